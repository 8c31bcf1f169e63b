"""A run of the tiny preset with the real learner and real engines, on machines of their own."""

import contextlib
import json
import subprocess
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

from tests.integration.network.namespaces import Host
from tests.integration.network.places import SNAPSHOT_PORT, Places
from tests.integration.network.real.learner import TRACE
from tests.integration.support.jobs import Job
from tests.integration.support.processes import kill, wait_until

DEADLINE_S = 1500.0


class Apart:
    """Learner and actors of one run; made by `apart`."""

    def __init__(self, where: Places, root: Path, name: str, fields: Mapping[str, object]) -> None:
        """Starts the learner; `fields` are of its config, by their dotted paths."""
        self.where, self.root, self.name = where, root, name
        self.folder = root / name
        self.actors: dict[str, subprocess.Popen[str]] = {}
        net = where.net
        own = {
            "run.dir": self.folder,
            "run.name": name,
            "store.url": where.store_url("learner"),
            "publish.serve": "https",
            "publish.listen": f"{net['learner'].address}:{SNAPSHOT_PORT}",
        }
        arguments = [
            "--config=tiny",
            *(f"--config.{k}={v}" for k, v in {**own, **fields}.items()),
        ]
        env = {**where.learner_env, TRACE: str(root / "trace.jsonl")}
        self.learner = self._spawn(
            net["learner"], "tests.integration.network.real.learner", "learner", *arguments, env=env
        )

    def start_actor(self, name: str, *arguments: str, module: str = "launch.actor", **env: str) -> None:
        """An actor that joins by the store; `env` is added to its environment."""
        own = (f"--store={self.where.store_url('actor')}", f"--run={self.name}", f"--name={name}")
        env = {**self.where.actor_env, "SLUICE_CACHE": str(self.root / "cache"), **env}
        work = f"--work_dir={self.root / 'work' / name}"
        self.actors[name] = self._spawn(self.where.net["actors"], module, name, *own, work, *arguments, env=env)

    def wait(self, condition: Any, what: str, *, deadline_s: float = DEADLINE_S) -> None:
        """`wait_until`, with the logs where it fails."""
        try:
            wait_until(condition, what, deadline_s=deadline_s)
        except AssertionError as e:
            raise AssertionError(f"{e}\n{self.logs()}") from e

    def wait_for_step(self, step: int) -> None:
        """Until so many updates are made."""
        self.wait(lambda: self.num_steps >= step, f"step {step}")

    @property
    def num_steps(self) -> int:
        """Updates made; fails at once if the learner failed."""
        assert self.learner.poll() in (None, 0), self.logs()
        return len(self.job.rows("step"))

    @property
    def job(self) -> Job:
        """The learner's folder, as tests read it."""
        return Job(self.folder, self.learner)

    @property
    def trace(self) -> list[dict[str, Any]]:
        """What the learner wrote down so far (`real.learner`)."""
        file = self.root / "trace.jsonl"
        return [json.loads(line) for line in file.read_text().split("\n")[:-1]] if file.exists() else []

    def log(self, name: str) -> str:
        """All that a process has said."""
        return (self.root / f"{name}.log").read_text(errors="replace")

    def logs(self) -> str:
        """The ends of all logs."""
        files = sorted(self.root.glob("*.log"))
        return "\n".join(f"--- {f.name}\n{f.read_text(errors='replace')[-3000:]}" for f in files)

    def end(self) -> None:
        """Kills what still runs."""
        for process in (self.learner, *self.actors.values()):
            if process.poll() is None:
                kill(process)

    def _spawn(self, host: Host, module: str, name: str, *arguments: object, env: Mapping[str, str]):
        with open(self.root / f"{name}.log", "w") as output:
            return host.spawn(module, *arguments, env=env, output=output)


@contextlib.contextmanager
def apart(where: Places, root: Path, name: str, fields: Mapping[str, object]) -> Generator[Apart]:
    """A run whose learner is started; all of it ends with the block."""
    made = Apart(where, root, name, fields)
    try:
        yield made
    finally:
        made.end()
