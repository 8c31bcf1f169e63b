"""`python -m launch.profile_machine`."""

from launch import command_line
from launch.profile_machine.command import main

command_line.run(main)
