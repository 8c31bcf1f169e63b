"""A real learner whose disk for checkpoints is full: it goes on, saves when there is room, ends when there never is."""

import contextlib
import dataclasses
import subprocess
import sys
import threading
import zlib
from collections.abc import Generator
from pathlib import Path

import numpy as np
import pytest

from bridge.rollout_types import Ticket
from bridge.store.open import SqliteStore, SqlStore
from configs import overrides
from configs.run_folder import RunFolder, set_up_run
from tests.bridge.factories import make_group, make_rollout
from tests.integration.network.places import fill, tmpfs
from tests.integration.support import jobs
from tests.integration.support.processes import REPO, wait_until

pytestmark = pytest.mark.integration
MIB = 2**20
NUM_UPDATES = 14
FIELDS = {
    "run.num_updates": NUM_UPDATES,
    "rounds.groups_per_round": 2,
    "rounds.groups_per_update": 2,
    "rounds.samples_per_group": 2,
    "admission.width": "auto",
    "sampling.max_response_tokens": 8,
    "packing.rows": 1,
    "checkpoint.every_n_steps": 1,
    "evaluation.num_problems": 0,
    "publish.probe_every_n_publishes": 0,
}


class Answering:
    """Stands for an actor: answers tickets with random tokens, as many as it may."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._allowed = threading.Semaphore(0)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def allow(self, num_updates: int) -> None:
        for _ in range(2 * num_updates):
            self._allowed.release()

    def close(self) -> None:
        self._is_over.set()
        self._allowed.release()
        self._thread.join()

    def _serve(self) -> None:
        with contextlib.closing(SqliteStore(self.folder / "store.sqlite")) as store:
            while self._allowed.acquire() and not self._is_over.is_set():
                while not (tickets := store.claim("a", limit=1, lease_s=60)) and not self._is_over.wait(0.05):
                    pass
                for ticket in tickets:
                    self._answer(store, ticket)

    def _answer(self, store: SqlStore, ticket: Ticket) -> None:
        version, random = ticket.min_version, np.random.default_rng(zlib.crc32(ticket.id.encode()))
        rollouts = tuple(
            make_rollout(8, step=version.step, tokens=random.integers(3, 90, 8, np.int32), reward=float(i % 2))
            for i in range(ticket.num_samples)
        )
        store.put_group(make_group(ticket, rollouts=rollouts, incarnation=version.incarnation))


@dataclasses.dataclass
class Learner:
    """A run folder whose checkpoints are on a disk of their own, and the learner's process."""

    folder: Path
    job: jobs.Job | None = None

    def start(self) -> jobs.Job:
        with open(self.folder / "learner.log", "a") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "launch.learner", f"--run_dir={self.folder}"],
                cwd=REPO,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
            )
        self.job = jobs.Job(self.folder, process)
        return self.job

    @property
    def log(self) -> str:
        return (self.folder / "learner.log").read_text()

    def wait(self, what: str, condition) -> None:
        job = self.job
        assert job is not None

        def there() -> bool:
            if condition():
                return True
            assert job.process.poll() is None, f"the learner ended before: {what}\n{self.log[-3000:]}"
            return False

        wait_until(there, what)

    def num_failed(self) -> float:
        assert self.job is not None
        return max((r["checkpoint/failed"] for r in self.job.rows("step")), default=0)

    def hashed(self) -> list[int]:
        return sorted(int(p.stem) for p in (self.folder / "checkpoints").resolve().parent.glob("*.hashes/*.json"))

    def acknowledged(self) -> int:
        with contextlib.closing(SqliteStore(self.folder / "store.sqlite")) as store:
            return store.counts()["acknowledged"]


@pytest.fixture
def disk(tmp_path: Path) -> Generator[Path]:
    """A small file system of its own, where this user may make one."""
    with contextlib.ExitStack() as parts:
        try:
            yield parts.enter_context(tmpfs(tmp_path / "disk", num_bytes=64 * MIB))
        except subprocess.CalledProcessError as e:
            pytest.skip(f"no tmpfs can be mounted here: {e}")


@pytest.fixture
def learner(tmp_path: Path, model: Path, disk: Path) -> Generator[tuple[Learner, Answering]]:
    config = overrides.load_preset("serial:tiny")
    fields = {**FIELDS, "run.dir": tmp_path / "run", "model.path": model}
    config = overrides.apply(config, {name: str(value) for name, value in fields.items()})
    folder = set_up_run(config)
    RunFolder(folder).model_path_file.write_text(f"{model}\n")
    (disk / "checkpoints").mkdir()
    (folder / "checkpoints").symlink_to(disk / "checkpoints")
    made, actor = Learner(folder), Answering(folder)
    try:
        yield made, actor
    finally:
        actor.close()
        if made.job is not None:
            made.job.end()


def test_learner_without_room_for_checkpoints_goes_on_saves_later_ends_in_the_end_and_loses_nothing(learner, disk):
    run, actor = learner
    folder = disk / "checkpoints"
    job = run.start()
    actor.allow(2)
    run.wait("checkpoint 2", lambda: run.hashed() == [1, 2])
    filler = fill(disk)
    actor.allow(2)  # that a save failed is seen by the step after
    run.wait("a save fails", lambda: "cannot save the checkpoint of step 3:" in run.log)
    (line,) = [line for line in run.log.splitlines() if "cannot save the checkpoint of step 3:" in line]
    assert f"{folder}: cannot save" in line and "its disk is full; free disk space" in line
    assert "a restart would begin at step 2" in line
    assert run.hashed() == [1, 2] and run.acknowledged() == 4
    assert not {p.name for p in folder.iterdir() if p.name.startswith("3")}  # nothing half is left
    filler.unlink()
    actor.allow(3)
    run.wait("the next ones are saved", lambda: run.hashed() == [6, 7] and run.acknowledged() >= 12)
    assert run.num_failed() >= 1

    filler = fill(disk)
    actor.allow(4)
    assert job.process.wait(120) == 1
    (line,) = [line for line in run.log.splitlines() if line.startswith("error: ")]
    assert "cannot save the checkpoint of step 10:" in line and "the last 3 failed" in line
    assert "start again to resume from the last checkpoint" in line
    assert run.hashed() == [6, 7] and run.acknowledged() == 14
    filler.unlink()
    job = run.start()
    actor.allow(NUM_UPDATES)
    assert job.process.wait(300) == 0, run.log[-3000:]
    assert "incarnation=1 step=7" in run.log
    jobs.check_every_group_trained_once(job, num_updates=NUM_UPDATES, per_update=2)
    assert run.acknowledged() == 2 * NUM_UPDATES
