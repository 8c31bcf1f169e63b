"""A vLLM server that ends with whoever started it: `python -m launch.judge_server ARGUMENTS`, those of `vllm serve`.

It asks the kernel to be killed with its parent, and then becomes vLLM: what it asked for outlasts that.
"""

import os
import sys

from launch.processes import lifeline

MODULE = "vllm.entrypoints.cli.main"


def main() -> None:
    """Becomes the server."""
    lifeline.die_with_parent()
    os.execv(sys.executable, [sys.executable, "-P", "-m", MODULE, "serve", *sys.argv[1:]])


if __name__ == "__main__":
    main()
