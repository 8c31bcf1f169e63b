"""The contract between learner and actor, and the two places where they meet."""
