"""Slurm jobs: scripts that are the same for every run; `render.py` writes beside them what is a run's own."""
