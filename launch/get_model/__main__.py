"""`python -m launch.get_model`."""

from launch import command_line
from launch.get_model.command import main

command_line.run(main, max_arguments=1)
