"""How responses come by their rewards."""
