"""`python -m launch.evaluate`."""

from launch import command_line
from launch.evaluate.command import main

if __name__ == "__main__":  # vLLM's processes import this module
    command_line.run(main)
