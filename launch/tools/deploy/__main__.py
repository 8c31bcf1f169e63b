"""`python -m launch.tools.deploy`."""

from launch import cli
from launch.tools.deploy.cli import main

cli.run(main)
