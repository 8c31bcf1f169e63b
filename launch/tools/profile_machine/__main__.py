"""`python -m launch.tools.profile_machine`."""

from launch import cli
from launch.tools.profile_machine.cli import main

cli.run(main)
