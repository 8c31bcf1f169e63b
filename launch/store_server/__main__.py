"""`python -m launch.store_server`."""

from launch import command_line
from launch.store_server.command import main

command_line.run(main)
