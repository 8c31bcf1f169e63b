"""The vLLM actor: claims tickets, samples groups, verifies them."""
