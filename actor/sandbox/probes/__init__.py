"""Programs that `isolation.check_isolation` runs in a sandbox: each a file of its own, as a policy's would be."""
