"""`python -m launch.samples`; the command itself is in `launch.samples.command`."""

from launch import command_line
from launch.samples.command import main

if __name__ == "__main__":
    command_line.run(main)
