"""vLLM behind the actor's engine protocol; the only package of the project that imports torch and vllm."""
