"""Weight snapshots: immutable, versioned, hashed; written by the learner, mapped by actors."""
