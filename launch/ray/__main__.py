"""`python -m launch.ray`."""

from launch import command_line
from launch.ray.command import main

command_line.run(main)
