"""Whether command lines are ones that programs take: each is parsed by the program's own flags, in its own process."""

import json
import subprocess
import sys
from collections.abc import Sequence

from tests.integration.support.processes import REPO

PARSE = """
import importlib, json, sys
from absl import flags
from launch import cli
module, lines = json.loads(sys.argv[1])
importlib.import_module(module)
for line in lines:
    cli.parse([module, *line])
    print(json.dumps(cli.given_overrides()))
"""


def parse(command: Sequence[str]) -> dict[str, str]:
    """The --config.* fields of `-m MODULE ARGUMENTS...`; fails where the program would not take the arguments."""
    assert command[0] == "-m"
    done = subprocess.run(
        [sys.executable, "-c", PARSE, json.dumps([command[1], [command[2:]]])],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
