"""Environments of more than one turn: played in processes of their own, token in, token out."""
