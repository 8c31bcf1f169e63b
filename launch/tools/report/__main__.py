"""`python -m launch.tools.report`."""

from launch import cli
from launch.tools.report.cli import main

cli.run(main)
