"""`python -m launch.compile_tpu`."""

import sys

from launch.compile_tpu.command import main

sys.exit(main(sys.argv[1:]))
