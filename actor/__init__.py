"""vLLM actor: claims tickets, samples groups and scores them."""
