"""The learner's processes, one a host: who they are, and how they agree."""
