"""`python -m launch.tools.compile_tpu`."""

from launch import cli
from launch.tools.compile_tpu.cli import main

cli.run(main)
