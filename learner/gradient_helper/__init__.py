"""Gradient helpers: engines' devices that train while a round's last responses run (RollPacker section 4.4)."""
