"""Renders what starts a run on a cluster: Kubernetes objects or Slurm jobs, from the config that launch.local takes."""
