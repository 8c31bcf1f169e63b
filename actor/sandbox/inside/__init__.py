"""What runs inside a sandbox: standard library only, on the sandbox's own Python, with nothing of ours beside it."""
