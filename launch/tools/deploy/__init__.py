"""Deployment files of a run on Kubernetes or Slurm, from the same config as launch.local."""
