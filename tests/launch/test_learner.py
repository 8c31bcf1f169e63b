"""How a learner's process ends, by what ended its training."""

import errno
import pathlib
import sqlite3
from types import SimpleNamespace
from typing import Any

import pytest

from bridge.snapshots.snapshot_format import SnapshotBusyError, SnapshotError
from bridge.store.sqlite_database import StoreBusyError
from bridge.store.store_types import StoreLostError, SupersededLearnerError
from configs.schema import Config
from launch import cli, learner
from launch.startup import prepare_run
from learner import follower as joining
from learner import open_run as opening
from learner import train as learner_train
from learner.checkpoint_hosts import CheckpointError
from learner.distributed import initialize as connecting
from learner.distributed import initialize as identities
from learner.distributed.channel import SingleProcess
from learner.distributed.initialize import Identity
from learner.heartbeat import Stopped
from learner.update_metrics import NotFiniteError
from tests.learner.publish.thread_hosts import ThreadHosts


@pytest.fixture
def end(monkeypatch):
    """`end(train, close, open_run)`: the exit code of a learner of which these parts raise that."""

    def call(train: Exception | None = None, close: Exception | None = None, open_run: Exception | None = None) -> int:
        def raising(error: Exception | None):
            def do(*_: Any, **__: Any) -> None:
                if error is not None:
                    raise error

            return do

        run = SimpleNamespace(step=7, checkpoints=SimpleNamespace(latest=5), close=raising(close))
        monkeypatch.setattr(opening, "open_run", lambda *_, **__: raising(open_run)() or run)
        monkeypatch.setattr(learner_train, "train", raising(train))
        return learner.main()

    folder = pathlib.Path("run")
    prepared = SimpleNamespace(config=Config(preset="test"), folder=folder, model_folder=folder)
    monkeypatch.setattr(learner, "_join", lambda: (prepared, SingleProcess()))
    monkeypatch.setattr(cli, "log_to_stderr", lambda: None)
    return call


FULL = OSError(28, "No space left on device", "metrics.jsonl")


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (dict(train=SnapshotError("/dev/shm needs 9 bytes more for snapshots")), 1, "/dev/shm needs 9 bytes more"),
        (dict(open_run=SnapshotError("another live process publishes")), 1, "another live process publishes"),
        (dict(train=CheckpointError("saving failed:\n disk full")), 1, "saving failed:; disk full; fix the cause"),
        (dict(train=Stopped(), close=CheckpointError("saving failed")), 1, "saving failed; fix the cause"),
        (
            dict(train=sqlite3.OperationalError("database or disk is full")),
            1,
            "database or disk is full; fix the cause",
        ),
        (dict(train=FULL), 1, "metrics.jsonl: No space left on device; fix the cause"),
        (dict(train=NotFiniteError("5 in a row")), 1, "5 in a row; the run's folder and its last checkpoint are kept"),
        (dict(train=StoreBusyError("store stayed locked")), 4, "store stayed locked; start again"),
        (dict(train=SnapshotBusyError("waiting for readers of")), 4, "waiting for readers of; start again"),
        (dict(train=StoreLostError("away for 600 s")), 4, "away for 600 s; start again"),
        (dict(train=SupersededLearnerError("another learner leads")), 5, "another learner leads; this learner's"),
    ],
)
def test_learner_that_can_not_go_on_says_so_in_one_line(end, capsys, raised, code, said):
    assert end(**raised) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {said}")


STALE = OSError(errno.ESTALE, "Stale file handle", "checkpoints/7")
STARTS = [
    (STALE, 4, "checkpoints/7: Stale file handle; fix the cause"),
    (ValueError("mesh wants 4 devices"), 2, "mesh wants 4 devices"),
]


@pytest.mark.parametrize(("raised", "code", "said"), STARTS)
def test_learner_that_can_not_start_is_started_again_unless_its_input_is_wrong(end, capsys, raised, code, said):
    with pytest.raises(SystemExit) as e:
        end(open_run=raised)
    assert e.value.code == code
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {said}")


@pytest.mark.parametrize(("raised", "code", "said"), STARTS)
def test_follower_that_can_not_start_does_not_decide_for_all_unless_its_input_is_wrong(
    monkeypatch, end, capsys, raised, code, said
):
    def join_run(*_: Any, **__: Any) -> None:
        raise raised

    prepared, _ = learner._join()
    monkeypatch.setattr(learner, "_join", lambda: (prepared, ThreadHosts.of(2)[1]))
    monkeypatch.setattr(joining, "join_run", join_run)
    with pytest.raises(SystemExit) as e:
        end()
    assert e.value.code == code
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {said}")


def test_learner_whose_run_folder_fails_before_it_has_joined_is_started_again(monkeypatch, end, capsys):
    def stale() -> None:
        raise STALE

    monkeypatch.setattr(learner, "_join", stale)
    with pytest.raises(SystemExit) as e:
        learner.main()
    assert e.value.code == cli.BUSY
    assert "Stale file handle; fix the cause" in capsys.readouterr().err


def test_learner_done_stopped_and_with_a_bug(end):
    assert end() == 0
    assert end(train=Stopped()) == cli.STOPPED
    with pytest.raises(TypeError):
        end(train=TypeError("a bug"))


@pytest.fixture
def join(monkeypatch):
    """`join(index, prepare)`: what a learner's process of two does to join, and in which order."""
    hosts_of_all = ThreadHosts.of(2)

    def call(index: int, prepare: Any) -> tuple[list[str], Any]:
        did: list[str] = []
        identity = Identity(index=index, count=2, coordinator="127.0.0.1:1")

        def connected(*_: Any, **__: Any) -> ThreadHosts:
            did.append("connected")
            return hosts_of_all[index]

        def prepared(_: Any, *, num_hosts: int, is_supervised: bool | None) -> Any:
            assert is_supervised is None  # the config decides
            assert num_hosts == 2  # each looks for the room of its own rows
            did.append("prepared")
            return prepare()

        for flag in ("_COORDINATOR", "_NUM_PROCESSES", "_PROCESS_ID"):
            monkeypatch.setattr(learner, flag, SimpleNamespace(value=None))
        monkeypatch.setattr(identities, "identify", lambda **_: identity)
        monkeypatch.setattr(connecting, "connect", connected)
        monkeypatch.setattr(connecting, "disconnect", lambda _: did.append("disconnected"))
        monkeypatch.setattr(prepare_run, "config", lambda: Config(preset="test"))
        monkeypatch.setattr(prepare_run, "prepare_run", prepared)
        try:
            return did, learner._join()[0]
        except (Exception, SystemExit) as e:
            return did, e

    return call


def test_processes_join_before_the_run_is_set_up_however_long_its_prompts_take(join):
    assert join(0, lambda: "the run") == (["connected", "prepared"], "the run")
    assert join(1, lambda: "the same") == (["connected", "prepared"], "the same")


@pytest.mark.parametrize(
    ("raised", "code"),
    [(ValueError("no such prompts"), 2), (STALE, 4), (TimeoutError("the store stayed locked"), 4), (TypeError(), 1)],
)
def test_run_that_can_not_be_set_up_ends_all_processes_with_the_leaders_code(join, capsys, raised, code):
    def refused() -> None:
        raise raised

    did, error = join(0, refused)
    assert (did, error) == (["connected", "prepared", "disconnected"], raised)
    did, error = join(1, refused)
    assert did == ["connected", "disconnected"]
    assert isinstance(error, SystemExit) and error.code == code
    assert capsys.readouterr().err == "error: learner process 0 could not set up the run; see its log\n"
