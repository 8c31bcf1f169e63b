"""Running the main job (`launch.local`) in a test, and reading what it left."""

import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from bridge import timeline
from bridge.store.open import SqliteStore
from learner.metrics.metrics_writer import read_rows
from tests.integration.support.processes import REPO, wait_until

SMALL = {
    "run.num_updates": 12,
    "optimizer.schedule": "constant",  # does not depend on num_updates, which resumed runs change
    "optimizer.learning_rate": 5e-4,  # updates here have a fraction of the preset's samples
    "rounds.groups_per_round": 8,
    "rounds.samples_per_group": 4,
    "rounds.groups_per_update": 2,
    "admission.width": 2,
    "packing.rows": 2,
    "checkpoint.every_n_steps": 4,
    "evaluation.num_problems": 24,
    "evaluation.every_n_steps": 0,
    "publish.probe_every_n_publishes": 1,
    "actor.max_num_seqs": 32,
    "actor.lease_s": 3,
}


@dataclasses.dataclass
class Job:
    """A started job and its run folder."""

    folder: Path
    process: subprocess.Popen[str]

    def finish(self, *, deadline_s: float = 900.0) -> str:
        """Waits for its end; returns what it printed. Fails the test if it failed."""
        try:
            output, _ = self.process.communicate(timeout=deadline_s)
        except subprocess.TimeoutExpired:
            self.end()
            raise AssertionError(f"the job did not end in {deadline_s} s\n{self.logs()}") from None
        assert self.process.returncode == 0, f"{output}\n{self.logs()}"
        return output

    def end(self) -> None:
        """Stops it whatever it does, with all it started."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.communicate(timeout=120)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.communicate()

    def rows(self, kind: str) -> list[dict[str, Any]]:
        """The run's metrics of a kind so far."""
        file = self.folder / "metrics.jsonl"
        return [r for r in read_rows(file) if r["kind"] == kind] if file.is_file() else []

    def events(self, name: str) -> list[dict[str, Any]]:
        """The event log's entries of a name so far."""
        return [e for e in timeline.read(self.folder / "events") if e["name"] == name]

    def pid(self, role: str) -> int:
        """Of the live learner or actor, as its last heartbeat says."""
        beats = [b for b in self.heartbeats() if b.role == role]
        return max(beats, key=lambda b: b.time_s).pid

    def heartbeats(self):
        """The last ones."""
        store = SqliteStore(self.folder / "store.sqlite")
        try:
            return store.heartbeats()
        finally:
            store.close()

    def wait_for_step(self, step: int, *, deadline_s: float = 600.0) -> None:
        """Until an optimizer step's row is there; fails at once if the job ends before."""

        def there() -> bool:
            rows = self.rows("step")
            if rows and rows[-1]["step"] >= step:
                return True
            assert self.process.poll() is None, f"the job ended before step {step}\n{self.logs()}"
            return False

        wait_until(there, f"step {step}\n{self.logs()}", deadline_s=deadline_s)

    def wait_for_checkpoint(self, step: int, *, deadline_s: float = 600.0) -> None:
        """Until a step's checkpoint is committed and hashed: what a killed learner can go back to."""
        hashes = self.folder / "checkpoints.hashes" / f"{step}.json"

        def there() -> bool:
            assert self.process.poll() is None, f"the job ended before checkpoint {step}\n{self.logs()}"
            return hashes.is_file()

        wait_until(there, f"checkpoint {step}", deadline_s=deadline_s)

    def logs(self) -> str:
        """The ends of its processes' logs."""
        return "\n".join(
            f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in (self.folder / "logs").glob("*.log")
        )


def start(folder: Path, model: Path, *, config: str = "tiny", cwd: Path = REPO, **overrides: object) -> Job:
    """Starts the job small, on a given model; keyword `rounds__groups_per_round=4` sets that field.

    `cwd` is the directory in which the command is started.
    """
    fields = SMALL | {"model.path": model} | {k.replace("__", "."): v for k, v in overrides.items()}
    return start_command(folder, fields, config=config, cwd=cwd, output=subprocess.PIPE)


def start_long_rounds(folder: Path, model: Path, *, updates_per_round: int = 8) -> Job:
    """Starts rolloutpipe with three rounds of frontiers of 40 tokens, one after the other."""
    return start(
        folder,
        model,
        run__num_updates=3 * updates_per_round,
        rounds__groups_per_round=2 * updates_per_round,
        sampling__max_response_tokens=40,
        model__max_tokens=64,
    )


def start_command(
    folder: Path, fields: Mapping[str, object], *, config: str, output: int | IO[str], cwd: Path = REPO
) -> Job:
    """Starts the job with these fields of the config, by their dotted paths; what it prints goes to `output`."""
    process = subprocess.Popen(
        [sys.executable, "-m", "launch.local", f"--config={config}"]
        + [f"--config.{k}={v}" for k, v in {"run.dir": folder, **fields}.items()],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(REPO)},
        stdout=output,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return Job(folder, process)


def check_every_group_trained_once(job: Job, *, num_updates: int, per_update: int, by_window: bool = False) -> None:
    """Asserts that the steps are contiguous and that no group is in two of them."""
    rows = job.rows("step")
    assert [r["step"] for r in rows] == list(range(1, num_updates + 1))
    trained = [i for r in rows for i in r["groups"]]
    assert all(len(r["groups"]) == per_update for r in rows)
    assert len(trained) == len(set(trained))
    if not by_window:  # there a group may overtake others, and the last ones are still out at the end
        assert sorted(trained) == [f"{i:09d}" for i in range(num_updates * per_update)]


def first_training_and_last_rollout(job: Job, round_: int) -> tuple[float, float]:
    """When a round's training began and when its last group was in, Unix seconds."""
    groups = {e["args"]["ticket"]: e for e in job.events("reward") if e["args"]["round"] == round_}
    groups = {t: e for t, e in groups.items() if e["args"]["kind"] == "train"}
    ends = [e["ts"] + e["dur"] for e in groups.values()]
    starts = [e["ts"] for e in job.events("train") if set(e["args"]["groups"].split(",")) & set(groups)]
    return min(starts) / 1e6, max(ends) / 1e6


def descendants(pid: int) -> set[int]:
    """All processes below one, from the kernel's table."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found, todo = set(), [pid]
    while todo:
        for child in children.get(todo.pop(), []):
            found.add(child)
            todo.append(child)
    return found


def is_alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    return state(pid) not in ("", "Z")


def state(pid: int) -> str:
    """The kernel's letter for what a process does (T: it is stopped); empty if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def sigkill(pid: int) -> None:
    """No chance to clean up."""
    os.kill(pid, signal.SIGKILL)
