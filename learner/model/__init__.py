"""Policy model: decoder in Flax NNX, attention, log-probabilities and Hugging Face files."""
