"""`python -m launch.tools.evaluate`."""

import importlib.util
import sys

from launch import cli
from launch.tools.evaluate.cli import main

if __name__ == "__main__":
    # A multiprocessing child imports the main module of this program, unless it is a `__main__`. With this spec, vLLM's
    # processes import `launch` and therefore exit on Ctrl-C without a traceback.
    sys.modules["__main__"].__spec__ = importlib.util.find_spec("launch.startup.tiny_model")
    cli.run(main)
