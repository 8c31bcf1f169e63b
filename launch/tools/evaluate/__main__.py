"""`python -m launch.tools.evaluate`."""

import importlib.util
import sys

from launch import cli
from launch.tools.evaluate.cli import main

if __name__ == "__main__":
    # A process that multiprocessing starts imports this program's main module first, but none that is a `__main__`.
    # With a module of ours in its place vLLM's processes import `launch`, and so end without a traceback on Ctrl-C.
    sys.modules["__main__"].__spec__ = importlib.util.find_spec("launch.startup.tiny_model")
    cli.run(main)
