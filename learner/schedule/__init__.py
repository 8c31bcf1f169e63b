"""Which tickets exist, which groups are trained and when a round is full; no model in here."""
