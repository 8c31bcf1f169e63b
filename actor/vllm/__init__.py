"""vLLM behind the actor's engine protocol; torch and vllm are imported in this room only."""
