"""What publishing weights takes: into shared memory, over the network, as a delta."""
