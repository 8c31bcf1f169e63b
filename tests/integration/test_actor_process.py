"""`python -m launch.actor` as a process: it serves, and it leaves nothing behind, whatever ends it."""

import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from actor.weights.model_folder import read_model_folder
from bridge import timeline
from bridge.rollout_types import Sampling, Task, Version
from bridge.snapshots.snapshot_writer import SnapshotWriter
from bridge.store.open import SqliteStore
from configs.run_folder import RunFolder, run_id, set_up_run, snapshot_folder
from configs.schema import Config
from configs.sections import ActorConfig, ModelConfig, PackingConfig, PublishConfig, RunConfig
from tests.bridge.factories import make_ticket
from tests.bridge.snapshots.whole import write_whole
from tests.integration.support import models
from tests.integration.support.jobs import is_alive
from tests.integration.support.processes import REPO, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.engine]

START_S = 400.0


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "launch.actor", f"--run_dir={folder}", *arguments],
        cwd=REPO,
        stdout=subprocess.PIPE,
        stderr=open(folder.parent / "stderr.txt", "w"),
        text=True,
        start_new_session=True,
    )


def children(pid: int) -> set[int]:
    """All processes below one."""
    found, front = set(), [pid]
    while front:
        one = front.pop()
        for task in Path(f"/proc/{one}/task").glob("*/children"):
            new = [int(p) for p in task.read_text().split()]
            found.update(new)
            front += new
    return found


@pytest.fixture
def run(tmp_path):
    """A run folder as the launcher sets it up, with tickets and a first snapshot."""
    model = models.make_folder(tmp_path / "model", tied=True)
    config = Config(
        preset="test",
        run=RunConfig(dir=str(tmp_path / "run")),
        model=ModelConfig(path=str(model), max_tokens=512),
        packing=PackingConfig(row_tokens=512),
        publish=PublishConfig(snapshot_dir=str(tmp_path / "snapshots")),
        actor=ActorConfig(enforce_eager=True, max_num_seqs=8),
    )
    folder = set_up_run(config)
    RunFolder(folder).model_path_file.write_text(f"{model}\n")
    writer = SnapshotWriter(
        snapshot_folder(config),
        run=run_id(folder),
        tokenizer_hash=read_model_folder(model, dtype="float32").tokenizer_hash,
    )
    store = SqliteStore(folder / "store.sqlite")
    yield folder, writer, store, models.read_weights(model)
    store.close()
    writer.close()


def change(folder: Path, **sections: dict[str, object]) -> None:
    """Gives fields of the run's configuration other values."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {name: config.get(name, {}) | fields for name, fields in sections.items()}))


def put(store: SqliteStore, *orders: int, max_tokens: int) -> None:
    store.put_tickets(
        make_ticket(
            f"t{o}",
            order=o,
            task=Task.judged_by("exact", answer="7"),
            sampling=Sampling(max_tokens=max_tokens, ignore_eos=True),
        )
        for o in orders
    )


def test_actor_serves_updates_in_flight_and_ends_cleanly_on_sigterm(run, tmp_path):
    folder, writer, store, weights = run
    change(folder, publish={"when": "every"}, admission={"policy": "window"}, rounds={"max_lag_steps": 1})
    write_whole(writer, Version(incarnation=0, step=0), weights, dtype="float32")
    put(store, *range(3), max_tokens=20)
    actor = start(folder)
    try:
        wait_until(
            lambda: actor.poll() is not None or len(store.read_groups(after_seq=0, limit=9)) == 3,
            "three groups",
            deadline_s=START_S,
        )
        assert actor.poll() is None, (tmp_path / "stderr.txt").read_text()[-3000:]
        engine = children(actor.pid)
        titles = [command_of(pid) for pid in engine]  # scheduler and model are one process, which the actor started
        assert sum(b"VLLM::" in title for title in titles) == sum(b"EngineCore" in title for title in titles) == 1
        for order in range(3, 100):
            put(store, order, max_tokens=300 + 2 * order)  # of many lengths, so that they don't all end at once
        wait_until(lambda: store.counts()["claimed"] > 0, "long ones are in service")
        steps = itertools.count(2, step=2)

        def is_one_begun_anew() -> bool:
            """After one more update: the one before may have come between two responses."""
            served = Version(incarnation=0, step=next(steps))
            write_whole(writer, served, models.perturbed(weights, seed=served.step, scale=1e-4), dtype="float32")
            wait_until(lambda: any(b.version == served for b in store.heartbeats()), f"{served} is served")
            return any(e["name"] == "stale" for e in timeline.read(folder / "events"))

        wait_until(is_one_begun_anew, "a response two updates behind begins anew")
        wait_until(lambda: store.counts()["claimed"] > 0, "more in service")
        actor.send_signal(signal.SIGTERM)
        assert actor.wait(timeout=60) == 0
    finally:
        actor.kill()
    assert store.counts()["claimed"] == 0
    # The kernel ends them with their parent, not before.
    wait_until(lambda: not any(is_alive(pid) for pid in engine), "the engine's end")
    assert [p.name for p in (tmp_path / "snapshots").iterdir() if ".copy-" in p.name] == []
    for stored in store.read_groups(after_seq=0, limit=99):
        order = stored.group.order
        assert {r.tokens.size for r in stored.group.rollouts} == {20 if order < 3 else 300 + 2 * order}
    (beat,) = store.heartbeats()
    assert beat.report is not None and beat.report.pause_s is not None
    assert beat.report.pause_s > 0 and beat.report.num_refused_snapshots == 0
    names = {e["name"] for e in timeline.read(folder / "events")}
    # Stale: what had begun two updates behind, with a bound of one, was begun anew.
    assert {"rollout", "reward", "prefetch", "pause", "start engine", "stale"} <= names
    assert "Traceback" not in (tmp_path / "stderr.txt").read_text()


def test_killed_actor_leaves_no_process_and_a_dead_engine_ends_the_actor(run, tmp_path):
    folder, writer, store, weights = run
    write_whole(writer, Version(incarnation=0, step=0), weights, dtype="float32")
    put(store, 0, max_tokens=20)
    first = start(folder)
    try:
        wait_until(lambda: len(store.read_groups(after_seq=0, limit=9)) == 1, "a group", deadline_s=START_S)
        engine = children(first.pid)
        assert engine
    finally:
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
    wait_until(lambda: not any(is_alive(pid) for pid in engine), "engine and verifiers are gone")

    put(store, 1, max_tokens=20)
    second = start(folder, "--name=actor-0-r1")
    try:
        wait_until(lambda: len(store.read_groups(after_seq=0, limit=9)) == 2, "another group", deadline_s=START_S)
        put(store, *range(2, 30), max_tokens=500)
        wait_until(lambda: store.counts()["claimed"] > 0, "long ones are in service")
        core = [p for p in children(second.pid) if b"EngineCore" in Path(f"/proc/{p}/cmdline").read_bytes()]
        os.kill(core[0], signal.SIGKILL)
        assert second.wait(timeout=60) == 1
    finally:
        second.kill()
    stderr = (tmp_path / "stderr.txt").read_text()
    assert sum(line.startswith("error: ") for line in stderr.splitlines()) == 1
    assert store.counts()["claimed"] == 0


def command_of(pid: int) -> bytes:
    """A process's command line; none of one that is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_stopped_engine_ends_the_actor_whether_it_starts_or_updates_weights(run, tmp_path):
    folder, writer, store, weights = run
    change(folder, supervision={"heartbeat_timeout_s": 3})
    write_whole(writer, Version(incarnation=0, step=0), weights, dtype="float32")
    put(store, 0, max_tokens=20)

    def check_ended(actor: subprocess.Popen[str], engine: int) -> None:
        assert actor.wait(timeout=60) == 1
        lines = (tmp_path / "stderr.txt").read_text().splitlines()
        (line,) = [x for x in lines if x.startswith("error: ")]
        assert line.startswith(f"error: killed child process {engine}: suspended for more than 3 s; ")
        assert not is_alive(engine)

    def stopped_child(actor: subprocess.Popen[str], title: bytes) -> int:
        def found() -> list[int]:
            return [p for p in children(actor.pid) if title in command_of(p)]

        wait_until(lambda: actor.poll() is not None or bool(found()), "the engine's process", deadline_s=START_S)
        os.kill(found()[0], signal.SIGSTOP)
        return found()[0]

    first = start(folder)
    try:
        check_ended(first, stopped_child(first, b"spawn_main"))  # it imports still, and has no title of its own
    finally:
        first.kill()
    second = start(folder, "--name=actor-0-r1")
    try:
        wait_until(lambda: len(store.read_groups(after_seq=0, limit=9)) == 1, "a group", deadline_s=START_S)
        engine = stopped_child(second, b"EngineCore")
        # No request is there that would be told of the engine's end: only the update waits for it.
        write_whole(writer, Version(incarnation=0, step=1), weights, dtype="float32")
        check_ended(second, engine)
    finally:
        second.kill()
    assert store.counts()["claimed"] == 0


def test_actor_without_a_run_folder_says_so(tmp_path):
    actor = start(tmp_path / "nothing", "--wait_s=0.2")
    assert actor.wait(timeout=60) == 2
    (line,) = [x for x in (tmp_path / "stderr.txt").read_text().splitlines() if x.startswith("error: ")]
    assert "expected a run folder" in line
