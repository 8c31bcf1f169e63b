"""Writes a file of small functions to write, for verifier=code: `python -m launch.code_tasks FILE [--num=20000]`."""

import json
import pathlib

from absl import flags

from bridge.files import replace_file
from configs.code_tasks import row
from launch import command_line

_NUM = flags.DEFINE_integer("num", 20_000, "Rows; those whose question was there before are left out.", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "Another file for each.")


SHARED_FLAGS = ()
"""Of all commands' those that this one takes."""


def main() -> int:
    """Writes it, whole or not at all."""
    with command_line.usage_errors():
        if len(command_line.given_arguments()) != 1:
            raise ValueError("give one FILE, as in python -m launch.code_tasks code_tasks.jsonl")
        file = pathlib.Path(command_line.given_arguments()[0])
        print(f"{file}: {write(file, num=_NUM.value, seed=_SEED.value)} functions to write, with test cases")
    return 0


def write(file: pathlib.Path, *, num: int, seed: int) -> int:
    """Writes the first `num` rows of a seed, less those whose question was there before; how many there are."""
    rows = {made["prompt"]: made for made in (row(seed, index) for index in range(num))}
    replace_file(file, "".join(json.dumps(made) + "\n" for made in rows.values()).encode())
    return len(rows)


if __name__ == "__main__":
    command_line.run(main, max_arguments=1)
