"""Whether command lines are ones that programs take: each is parsed by the program's own flags, in its own process."""

import json
from collections.abc import Sequence

from tests.integration.support.processes import python

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
    done = python("-c", PARSE, json.dumps([command[1], [command[2:]]]))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
