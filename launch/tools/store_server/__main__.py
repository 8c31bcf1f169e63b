"""`python -m launch.tools.store_server`."""

from launch import cli
from launch.tools.store_server.cli import main

if __name__ == "__main__":
    cli.run(main)
