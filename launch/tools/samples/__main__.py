"""`python -m launch.tools.samples`."""

from launch import cli
from launch.tools.samples.cli import main

if __name__ == "__main__":
    cli.run(main)
