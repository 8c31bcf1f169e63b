"""`python -m launch.deploy`."""

from launch import command_line
from launch.deploy.command import main

command_line.run(main)
