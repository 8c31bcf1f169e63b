"""The policy: Qwen decoders in Flax NNX, attention, log-probabilities, Hugging Face files."""
