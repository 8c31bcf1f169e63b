"""The sides of the learner bench that are not ours, and what all sides share."""
