"""`python -m launch.tools.plan`."""

from launch import cli
from launch.tools.plan.cli import main

cli.run(main)
