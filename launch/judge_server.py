"""A vLLM server that ends with whoever started it: `python -m launch.judge_server ARGUMENTS`, those of `vllm serve`.

It asks the kernel to be killed with its parent, and then becomes vLLM: what it asked for outlasts that. It becomes the
server's own module: the command `vllm` asks for the metadata of a package of that name, which builds for CPUs lack.
"""

import os
import sys

from launch.processes import lifeline

MODULE = "vllm.entrypoints.openai.api_server"


def main() -> None:
    """Becomes the server."""
    lifeline.die_with_parent()
    os.execv(sys.executable, [sys.executable, "-P", "-m", MODULE, *sys.argv[1:]])


if __name__ == "__main__":
    main()
