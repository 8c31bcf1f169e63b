"""`python -m launch.compile_tpu`."""

from launch import command_line
from launch.compile_tpu.command import main

command_line.run(main)
