"""`python -m launch.report`; the command itself is in `launch.report.command`."""

from launch import command_line
from launch.report.command import main

if __name__ == "__main__":
    command_line.run(main)
