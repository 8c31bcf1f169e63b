"""The versions that processes on different machines compare before they work together."""

SLUICE = "0.1.0"
"""Of this build, as in pyproject.toml."""
VLLM = "0.32.0"
"""Of the engine that this build is tested with; an actor's may say more behind it, as in 0.32.0+cpu."""
