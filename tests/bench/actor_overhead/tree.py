"""A process that runs phases with the code of one tree of files."""

import contextlib
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Generator

from tests.bench.actor_overhead.phase import Phase

SERVER = pathlib.Path(__file__).with_name("server.py")
START_S, PHASE_S = 300.0, 300.0


class Tree:
    """Made by `started`."""

    def __init__(self, process: "subprocess.Popen[str]", log: pathlib.Path) -> None:
        self._process, self._log = process, log

    @classmethod
    @contextlib.contextmanager
    def started(cls, tree: pathlib.Path, work: pathlib.Path, model: pathlib.Path, phase: Phase) -> Generator["Tree"]:
        """Starts the engine, with the code of `tree`; ends it at the end."""
        work.mkdir()
        log = work / "log"
        with open(log, "w") as out:
            process = subprocess.Popen(
                [sys.executable, "-P", str(SERVER), str(work), str(model), json.dumps(dataclasses.asdict(phase))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
                text=True,
                cwd=tree,
                env=os.environ | {"PYTHONPATH": str(tree)},
            )
        try:
            one = cls(process, log)
            one._answer()
            yield one
        finally:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()

    def run(self, kind: str) -> float:
        """A phase, `bare` or `actor`; tokens a second."""
        assert self._process.stdin is not None
        self._process.stdin.write(kind + "\n")
        self._process.stdin.flush()
        return float(self._answer())

    def _answer(self) -> str:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise RuntimeError(f"{self._process.args} ended: {self._log.read_text()[-3000:]}")
        return line.strip()
