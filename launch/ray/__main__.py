"""`python -m launch.ray`."""

from launch import cli
from launch.ray.cli import main

cli.run(main)
