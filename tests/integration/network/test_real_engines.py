"""The tiny preset with real vLLM across three machines: actors are killed and join, and it learns as on one machine."""

import contextlib
import json
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from configs.run_folder import RunFolder
from learner.metrics import read_rows
from tests.integration.network.namespaces import Host
from tests.integration.network.places import SNAPSHOT_PORT, Places
from tests.integration.support.jobs import Job, check_every_group_trained_once, start_command
from tests.integration.support.processes import REPO, kill, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.engine, pytest.mark.slow]

NUM_UPDATES, PER_UPDATE = 160, 16
FIELDS = {
    "run.num_updates": NUM_UPDATES,
    "evaluation.num_problems": 256,
    "evaluation.every_n_steps": 40,
    "checkpoint.every_n_steps": 20,
    "actor.lease_s": 5,
    "publish.probe_every_n_publishes": 5,
}
STANDARD_ERROR = 0.03
"""Of a held-out reward of 256 sampled responses (tests/bench/results/learning.md)."""
DEADLINE_S = 1500.0


class Apart:
    """Learner and actors of one run on machines of their own."""

    def __init__(self, where: Places, root: Path) -> None:
        self.where, self.root = where, root
        self.folder = root / "apart"
        self.actors: dict[str, subprocess.Popen[str]] = {}
        net = where.net
        fields = FIELDS | {
            "run.dir": self.folder,
            "run.name": "apart",
            "store.url": where.store_url("learner"),
            "publish.serve": "https",
            "publish.listen": f"{net['learner'].address}:{SNAPSHOT_PORT}",
        }
        arguments = [f"--config={REPO / 'configs/tiny.py'}", *(f"--config.{k}={v}" for k, v in fields.items())]
        self.learner = self._spawn(net["learner"], "launch.learner", "learner", *arguments, env=where.learner_env)

    def start_actor(self, name: str) -> None:
        arguments = (f"--store={self.where.store_url('actor')}", "--run=apart", f"--name={name}")
        env = {**self.where.actor_env, "SLUICE_CACHE": str(self.root / "cache")}
        host = self.where.net["actors"]
        self.actors[name] = self._spawn(
            host, "launch.actor", name, *arguments, f"--work_dir={self.root / name}", env=env
        )

    def wait_for_step(self, step: int) -> None:
        wait_until(lambda: self.num_steps >= step, f"step {step}\n{self.logs()}", deadline_s=DEADLINE_S)

    @property
    def num_steps(self) -> int:
        assert self.learner.poll() in (None, 0), self.logs()
        return len(Job(self.folder, self.learner).rows("step"))

    def logs(self) -> str:
        files = sorted(self.root.glob("*.log"))
        return "\n".join(f"--- {f.name}\n{f.read_text(errors='replace')[-3000:]}" for f in files)

    def end(self) -> None:
        for process in (self.learner, *self.actors.values()):
            if process.poll() is None:
                kill(process)

    def _spawn(self, host: Host, module: str, name: str, *arguments: object, env: Mapping[str, str]):
        with open(self.root / f"{name}.log", "w") as output:
            return host.spawn(module, *arguments, env=env, output=output)


@contextlib.contextmanager
def apart(where: Places, root: Path) -> Iterator[Apart]:
    made = Apart(where, root)
    try:
        yield made
    finally:
        made.end()


def held_out(folder: Path) -> list[float]:
    """The held-out rewards of a run, first to last."""
    return [r["eval/reward"] for r in read_rows(RunFolder(folder).metrics) if r["kind"] == "eval"]


def test_tiny_preset_on_three_machines_learns_as_on_one_though_actors_are_killed_and_join(
    where: Places, tmp_path: Path
):
    job = start_command(tmp_path / "one", FIELDS, config="configs/tiny.py", output=subprocess.DEVNULL)
    try:
        assert job.process.wait(DEADLINE_S) == 0, job.logs()
    finally:
        job.end()
    with apart(where, tmp_path) as run:
        for name in ("a", "b"):
            run.start_actor(name)
        run.wait_for_step(30)
        kill(run.actors.pop("a"))
        run.start_actor("c")
        run.wait_for_step(90)
        run.actors["b"].terminate()
        assert run.actors.pop("b").wait(120) == 0, run.logs()
        wait_until(lambda: run.learner.poll() is not None, "the run's end", deadline_s=DEADLINE_S)
        assert run.learner.returncode == 0, run.logs()
        check_every_group_trained_once(Job(run.folder, run.learner), num_updates=NUM_UPDATES, per_update=PER_UPDATE)
    one, three = held_out(tmp_path / "one"), held_out(tmp_path / "apart")
    print(json.dumps({"one": one, "three": three}))
    assert three[-1] - three[0] > 0.2
    assert abs(one[-1] - three[-1]) < 4 * 2**0.5 * STANDARD_ERROR
