"""Weight snapshots: immutable, versioned and hashed; written by the learner, mapped by actors."""
