"""Code that runs inside a sandbox: standard library only, on the sandbox's Python, without other project modules."""
