"""`python -m launch.plan`."""

from launch import command_line
from launch.plan.command import main

command_line.run(main)
