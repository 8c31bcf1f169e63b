"""Command lines of a command of `launch`, tried in a test.

A command defines flags, and two of them may name one alike, so most are tried in a process of their own.
"""

import contextlib
import dataclasses
import importlib
import io
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Sequence

import pytest
from absl import flags
from absl.testing import flagsaver

from launch import cli
from tests.integration.support.processes import REPO


@dataclasses.dataclass(frozen=True)
class Done:
    """How a command line ended, and what it printed."""

    code: int
    out: str
    err: str


def call(main: Callable[[], int], *arguments: str, max_arguments: int = 0) -> int:
    """Calls a command in this process; the flags are afterwards as they were."""
    with pytest.MonkeyPatch.context() as patch, flagsaver.flagsaver():
        patch.setattr(cli, "_overrides", {})
        patch.setattr(cli, "_arguments", [])
        try:
            cli.parse(["test", *arguments], max_arguments=max_arguments)
            return main()
        except SystemExit as e:
            assert isinstance(e.code, int)
            return e.code
        finally:
            flags.FLAGS.unparse_flags()


def call_each(
    module: str, lines: Sequence[Sequence[str]], *, max_arguments: int = 0, cwd: pathlib.Path = REPO
) -> list[Done]:
    """Calls a module's `main` with one command line after the other, all in one other process."""
    done = subprocess.run(
        [sys.executable, "-m", __name__, module, str(max_arguments)],
        input=json.dumps(lines),
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return [Done(**one) for one in json.loads(done.stdout)]


def _call_and_capture(main: Callable[[], int], arguments: Sequence[str], max_arguments: int) -> Done:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = call(main, *arguments, max_arguments=max_arguments)
    return Done(code, out.getvalue(), err.getvalue())


if __name__ == "__main__":
    main_ = importlib.import_module(sys.argv[1]).main
    ended = [_call_and_capture(main_, line, int(sys.argv[2])) for line in json.load(sys.stdin)]
    print(json.dumps([dataclasses.asdict(one) for one in ended]))
