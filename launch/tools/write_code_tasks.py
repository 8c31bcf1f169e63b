"""Writes rows for verifier=code: `python -m launch.tools.write_code_tasks FILE [--num=20000]`."""

import json
import pathlib

from absl import flags

from bridge.files import replace_file
from configs.tasks.code_functions import row
from launch import cli

_NUM = flags.DEFINE_integer("num", 20_000, "Rows; those whose question was there before are left out.", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "Another file for each.")


SHARED_FLAGS = ()
"""Of all commands' those that this one takes."""


def main() -> int:
    """Writes it, whole or not at all."""
    with cli.usage_errors():
        if len(cli.given_arguments()) != 1:
            raise ValueError("give one FILE, as in python -m launch.tools.write_code_tasks code_tasks.jsonl")
        file = pathlib.Path(cli.given_arguments()[0])
        print(f"{file}: {write(file, num=_NUM.value, seed=_SEED.value)} functions to write, with test cases")
    return 0


def write(file: pathlib.Path, *, num: int, seed: int) -> int:
    """Writes the first `num` rows of a seed, less those whose question was there before; how many there are."""
    rows = {made["prompt"]: made for made in (row(seed, index) for index in range(num))}
    replace_file(file, "".join(json.dumps(made) + "\n" for made in rows.values()).encode())
    return len(rows)


if __name__ == "__main__":
    cli.run(main, max_arguments=1)
