"""A supervisor over real processes that do what the test says."""

import dataclasses
import io
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from rich.console import Console

from bridge import timeline
from bridge.files import RunLock
from bridge.liveness import Activity
from configs.run_folder import RunFolder, run_id, set_up_run, snapshot_folder
from configs.schema import Config
from configs.sections import ActorConfig, PublishConfig, RunConfig, SupervisionConfig
from launch import cli
from launch.startup.prepare_run import PreparedRun
from launch.supervision import process_tree, supervisor
from launch.supervision.backend import LocalBackend, run_tag
from launch.supervision.child import Child
from launch.supervision.placement import Machine
from launch.supervision.supervisor import RunOutcome, Supervisor
from tests.integration.support.jobs import is_alive
from tests.integration.support.processes import REPO, wait_until

BOUNDS = SupervisionConfig(heartbeat_timeout_s=4, start_timeout_s=20, progress_timeout_s=4, shutdown_grace_s=20)
"""A heart beats every second."""


class Said(io.StringIO):
    """What a supervisor prints; once `what` is printed, `file` is there."""

    def __init__(self, what: str, file: pathlib.Path) -> None:
        super().__init__()
        self.what, self.file = what, file

    def write(self, text: str) -> int:
        if self.what in text:
            self.file.touch()
        return super().write(text)


@pytest.fixture
def prepared(tmp_path, monkeypatch):
    """`prepared(learner=[...], actor=[...])`: a run whose processes do that, one entry a start."""

    def call(
        *, learner: list[str], actor: list[str], others: Sequence[list[str]] = (), max_restarts: int = 2
    ) -> PreparedRun:
        config = Config(
            preset="test",
            run=RunConfig(dir=str(tmp_path / "run")),
            publish=PublishConfig(snapshot_dir=str(tmp_path / "snapshots")),
            actor=ActorConfig(max_restarts=max_restarts, num_engines=1 + len(others)),
            supervision=BOUNDS,
        )
        folder = set_up_run(config)
        (folder / "learner.json").write_text(json.dumps(learner))
        for i, one in enumerate([actor, *others]):
            (folder / f"actor-{i}.json").write_text(json.dumps(one))
        return PreparedRun(config, folder, tmp_path / "model")

    monkeypatch.setattr(
        Child,
        "command",
        lambda self: [sys.executable, "-m", "tests.launch.fake_role", self.role, str(tmp_path / "run")],
    )
    return call


def crew(prepared: PreparedRun, machine: Machine) -> LocalBackend:
    return LocalBackend(prepared.config, prepared.folder.resolve(), machine)


def watch(prepared: PreparedRun, *, what: str = "nothing") -> tuple[RunOutcome, str, Supervisor]:
    said = Said(what, prepared.folder / "said")
    one = Supervisor(prepared, Console(file=said, width=200), backend=crew(prepared, Machine(gpus=(), cores=(0, 1))))
    return one.run(), said.getvalue(), one


def pids(prepared: PreparedRun, role: str) -> list[int]:
    return [int(line) for line in (prepared.folder / f"{role}.pids").read_text().split()]


@pytest.mark.heavy
def test_stopped_actor_is_killed_with_all_it_started_and_started_again(prepared):
    run = prepared(learner=["until said"], actor=["stop", "serve"])
    ending, said, _ = watch(run, what="restarting (restart 1)")
    assert ending is RunOutcome.DONE
    assert "actor-0 hung (no heartbeat for 4 s) and was killed; restarting (restart 1)" in said
    assert "hung (no heartbeat for 4 s)" in (run.folder / "logs" / "actor-0.log").read_text()
    assert len(pids(run, "learner")) == 1
    assert not is_alive(pids(run, "actor-0")[0])
    grandchild = int((run.folder / "grandchildren").read_text())
    wait_until(lambda: not is_alive(grandchild), "what the actor had started")


@pytest.mark.heavy
def test_event_log_has_what_was_started_and_what_was_said(prepared):
    run = prepared(learner=["until said"], actor=["stop", "serve"])
    watch(run, what="restarting (restart 1)")
    events = [e for e in timeline.read(RunFolder(run.folder).events) if e["ph"] == "i"]
    told = [e for e in events if e["name"] in ("start", "exit")]
    names = [("start", "learner"), ("start", "actor-0"), ("exit", "actor-0"), ("start", "actor-0-r1")]
    assert [(e["name"], e["args"]["process"]) for e in told][:4] == names
    how = {"how": "hung (no heartbeat for 4 s) and was killed", "then": "; restarting (restart 1)"}
    assert told[2]["args"] == {"process": "actor-0"} | how
    assert events[-1]["name"] == "end"


@pytest.mark.heavy
def test_actor_that_wants_other_limits_is_said_each_time_with_them(prepared):
    run = prepared(learner=["until said"], actor=["resize 4", "resize 7", "resize", "serve"])
    ending, said, _ = watch(run, what="engine limits (3)")
    assert ending is RunOutcome.DONE
    lines = [
        f"restarting actor-0 with new engine limits ({i}): max_num_seqs={num}, tensor_parallel_size=1"
        for i, num in ((1, 4), (2, 7), (3, ActorConfig().max_num_seqs))
    ]
    assert [line for line in said.splitlines() if "limits" in line] == lines
    told = [e["args"]["line"] for e in timeline.read(RunFolder(run.folder).events) if e["name"] == "message"]
    assert [line for line in told if "limits" in line] == lines


@pytest.mark.heavy
def test_each_engine_has_an_actor_and_a_restart_of_one_leaves_the_others_alone(prepared):
    run = prepared(learner=["until said"], actor=["serve"], others=[["stop", "serve"], ["serve"]])
    ending, said, one = watch(run, what="restarting (restart 1)")
    assert ending is RunOutcome.DONE
    assert "actor-1 hung (no heartbeat for 4 s) and was killed; restarting (restart 1)" in said
    assert [len(pids(run, f"actor-{i}")) for i in (0, 2)] == [1, 1]
    assert {a.name for a in one._actors} == {"actor-0", "actor-1-r1", "actor-2"}


@pytest.mark.heavy
def test_actor_that_can_not_be_started_is_given_up_while_another_is_left(prepared):
    run = prepared(learner=["until said"], actor=["fail"], others=[["serve"]])
    ending, said, one = watch(run, what="the run continues without it")
    assert ending is RunOutcome.DONE
    assert "actor-0-r2 exited with code 1: it can't (after 2 restarts without a new step)" in said.replace("\n", "")
    assert len(pids(run, "actor-0")) == 3 and len(pids(run, "actor-1")) == 1
    assert one._describe(one._actors[0]).endswith("exited (1), not restarted")


@pytest.mark.heavy
def test_run_fails_once_every_actor_is_given_up(prepared):
    ending, said, one = watch(prepared(learner=["serve"], actor=["fail"], others=[["fail"]]))
    assert ending is RunOutcome.FAILED and said.count("the run continues without it") == 1
    assert one.last_error.endswith("(after 2 restarts without a new step)")


@pytest.mark.heavy
def test_steps_of_others_do_not_count_for_an_actor_that_never_starts(prepared):
    run = prepared(learner=["step by step"], actor=["starting and fail"], others=[["serve"]])
    ending, said, _ = watch(run, what="the run continues without it")
    assert ending is RunOutcome.DONE and said.count("the run continues without it") == 1
    assert "exited with code 1: it can't (same startup failure twice; not restarted)" in said.replace("\n", "")
    assert len(pids(run, "actor-0")) == 2


def test_actor_that_fails_otherwise_in_each_start_is_started_until_the_bound(prepared):
    run = prepared(learner=["serve"], actor=["starting and fail", "fail", "starting and fail", "serve"], max_restarts=9)
    one = Supervisor(run, Console(file=io.StringIO()))
    child = Mock(name="actor-0")
    given_up = []
    for doing, code, cause in [
        (Activity.STARTING, 1, "no room for 7"),
        (Activity.WORKING, 1, "no room for 7"),  # it had started
        (Activity.STARTING, 1, "no room for 7"),
        (Activity.STARTING, -9, "no room for 7"),  # killed from outside
        (Activity.STARTING, 1, "no room for 7"),
        (Activity.STARTING, 1, "no port"),
        (Activity.STARTING, 4, "no port"),  # it may pass
        (Activity.STARTING, 1, "no room for 7"),
        (Activity.STARTING, 1, "no room for 8"),
    ]:
        child.doing, child.returncode = doing, code
        given_up.append(one._fails_alike(child, cause))  # pyright: ignore[reportArgumentType]
    one._lock.release()
    assert given_up == [False] * 8 + [True]


def test_several_engines_on_a_cpu_get_cores_of_their_own(prepared):
    run = prepared(learner=["end"], actor=["serve"], others=[["serve"]])
    actors = crew(run, Machine(gpus=(), cores=(0, 1, 2, 3))).actors
    given = [[a for a in actor._arguments if a.startswith("--cpu_cores")] for actor in actors]
    assert given == [["--cpu_cores=0,1"], ["--cpu_cores=2,3"]]


def test_engines_see_their_own_devices_and_the_learner_its_own(prepared):
    run = prepared(learner=["end"], actor=["serve"], others=[["serve"]])
    one = crew(run, Machine(gpus=("0", "1", "2"), cores=(0,)))
    children = [child for child in (one.learner, *one.actors) if isinstance(child, Child)]
    assert [child._environment for child in children] == [{"CUDA_VISIBLE_DEVICES": d} for d in "012"]


@pytest.mark.parametrize(
    ("behaviour", "said"),
    [
        ("stop", "no heartbeat for 4 s"),
        ("idle", "no progress for 4 s"),
        pytest.param("silent", "no first heartbeat for 16 s", marks=pytest.mark.heavy),
    ],
)
def test_learner_that_hangs_is_killed_and_started_again(prepared, behaviour, said):
    run = prepared(learner=[behaviour, "end"], actor=["serve"])
    ending, printed, _ = watch(run)
    assert ending is RunOutcome.DONE
    assert f"learner hung ({said}) and was killed; restarting (restart 1)" in printed
    assert len(pids(run, "learner")) == 2


def test_no_live_actor_reaches_the_terminal(prepared):
    ending, said, _ = watch(prepared(learner=["until said"], actor=["serve"]), what="no live actor")
    assert ending is RunOutcome.DONE
    assert said.count("no live actor: the learner waits; actor-0: pid ") == 1


def test_no_live_actor_is_said_once_until_one_lives_again(prepared):
    said = io.StringIO()
    one = Supervisor(prepared(learner=["end"], actor=["serve"]), Console(file=said, width=200))
    actor = SimpleNamespace(name="actor-0", describe=lambda: "pid 1")
    one._actors = [actor]  # pyright: ignore[reportAttributeAccessIssue]
    counts = []
    for doing in (
        Activity.NO_ACTORS,
        Activity.WORKING,
        Activity.NO_ACTORS,
        Activity.STARTING,
        Activity.NO_ACTORS,
        Activity.WAITING,
        Activity.NO_ACTORS,
    ):
        one._learner = SimpleNamespace(doing=doing)  # pyright: ignore[reportAttributeAccessIssue]
        one._report_no_actors()
        counts.append(said.getvalue().count("no live actor"))
    one._lock.release()
    assert counts == [1, 1, 1, 1, 1, 1, 2]


@pytest.mark.heavy
def test_restarts_without_a_new_step_are_bounded(prepared):
    run = prepared(learner=["idle"], actor=["serve"])
    ending, said, one = watch(run)
    assert ending is RunOutcome.FAILED
    assert one.last_error.endswith("(after 2 restarts without a new step)") and said.count("; restarting") == 2
    assert len(pids(run, "learner")) == 3


@pytest.mark.heavy
def test_restarts_after_a_new_step_each_are_not_bounded(prepared):
    # Each is killed, but only after a step that the run had never reached; the fifth goes no further than the fourth.
    run = prepared(learner=[f"steps {n}" for n in (1, 2, 3, 4, 4, 4, 4)], actor=["serve"])
    ending, _, one = watch(run)
    assert ending is RunOutcome.FAILED and "restarts without a new step" in one.last_error
    assert len(pids(run, "learner")) in (6, 7)  # the last new step may be seen before or after its process is replaced


@pytest.mark.parametrize(
    ("role", "behaviour", "ending"),
    [
        ("learner", "fail", RunOutcome.FAILED),
        ("learner", "unusable", RunOutcome.UNUSABLE),
        ("actor", "unusable", RunOutcome.UNUSABLE),
    ],
)
def test_process_that_would_fail_again_is_not_started_again(prepared, role, behaviour, ending):
    got, _, one = watch(prepared(**({"learner": ["serve"], "actor": ["serve"]} | {role: [behaviour]})))
    assert got is ending and "error: it" not in one.last_error and ": it " in one.last_error


def test_actor_that_ends_in_order_just_before_its_learner_is_not_started_again(prepared):
    run = prepared(learner=["until said"], actor=["end"])
    ending, said, _ = watch(run, what="no live actor")
    assert ending is RunOutcome.DONE and "; restarting" not in said and len(pids(run, "actor-0")) == 1


def test_actor_that_ends_in_order_while_its_learner_goes_on_is_started_again(prepared, monkeypatch):
    monkeypatch.setattr(supervisor, "ENDING_S", 0.0)
    ending, said, _ = watch(prepared(learner=["until said"], actor=["end", "serve"]), what="restarting (restart 1)")
    assert ending is RunOutcome.DONE and "actor-0 exited with code 0" in said


@pytest.mark.heavy
def test_learner_that_waited_too_long_for_another_process_is_started_again_after_longer_and_longer_pauses(
    prepared, monkeypatch
):
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_S", 0.25)
    ending, said, _ = watch(prepared(learner=["busy", "busy", "end"], actor=["serve"]))
    assert ending is RunOutcome.DONE
    assert "learner exited with code 4: it is locked; restarting in 0.25 s (restart 1)" in said
    assert "restarting in 0.5 s (restart 2)" in said


def test_process_that_waits_to_be_started_again_is_started_when_its_pause_is_over(prepared, monkeypatch):
    clock = SimpleNamespace(now_s=0.0, sleep=lambda s: None)
    clock.monotonic = lambda: clock.now_s
    monkeypatch.setattr(supervisor, "time", clock)
    one = Supervisor(prepared(learner=["end"], actor=["serve"]), Console(file=io.StringIO()))
    started: list[float] = []

    class Ended:
        name, returncode, hung, num_restarts, num_restarts_in_a_row = "learner", cli.BUSY, "", 0, 0

        def kill(self) -> None:
            pass

        def last_error(self) -> str:
            return "full"

        def start(self) -> None:
            started.append(clock.now_s)

    child = Ended()
    assert one._may_restart(child) and started == []  # pyright: ignore[reportArgumentType]
    clock.now_s = supervisor.FIRST_PAUSE_S - 0.1
    assert one._waits_for_its_start(child) and started == []  # pyright: ignore[reportArgumentType]
    clock.now_s = supervisor.FIRST_PAUSE_S
    assert not one._waits_for_its_start(child) and started == [clock.now_s]  # pyright: ignore[reportArgumentType]
    assert not one._waits_for_its_start(child) and len(started) == 1  # pyright: ignore[reportArgumentType]


def test_learner_that_somebody_else_told_to_stop_is_started_again(prepared):
    ending, said, _ = watch(prepared(learner=["stopped", "end"], actor=["serve"]))
    assert ending is RunOutcome.DONE
    assert "learner exited with code 3: stopped step=7; restarting (restart 1)" in said


def test_learner_has_its_bound_to_stop_and_actors_a_shorter_one_from_its_end_on(prepared, monkeypatch):
    run = prepared(learner=["end"], actor=["serve"])
    one = Supervisor(run, Console(file=io.StringIO()))
    clock = SimpleNamespace(now_s=100.0)
    clock.monotonic = lambda: clock.now_s
    monkeypatch.setattr(supervisor, "time", clock)
    waited: list[float] = []

    def kill_after(is_over):
        began_s = clock.now_s
        while not is_over():
            clock.now_s += 1
        waited.append(clock.now_s - began_s)

    children = [SimpleNamespace(request_stop=lambda: None, kill_after=kill_after) for _ in range(2)]
    one._children, one._learner = children, children[0]  # pyright: ignore[reportAttributeAccessIssue]
    one._stop()
    assert waited == [run.config.supervision.shutdown_grace_s, supervisor.ENDING_S]


class Impatient(io.StringIO):
    """A terminal whose user presses Ctrl-C, or that hangs up, as soon as it says one of these; `file` is then there."""

    def __init__(self, *lines: str, number: signal.Signals = signal.SIGINT, file: pathlib.Path | None = None) -> None:
        super().__init__()
        self.lines, self.number, self.file = list(lines), number, file

    def write(self, text: str) -> int:
        if self.lines and self.lines[0] in text:
            del self.lines[0]
            signal.raise_signal(self.number)
            if self.file is not None:
                self.file.touch()
        return super().write(text)


def test_second_interrupt_ends_a_learner_that_takes_its_time_at_once(prepared):
    run = prepared(learner=["deaf"], actor=["serve"])
    run = dataclasses.replace(
        run, config=dataclasses.replace(run.config, supervision=dataclasses.replace(BOUNDS, shutdown_grace_s=1e9))
    )
    said = Impatient("no live actor", "press Ctrl-C again")
    ending = Supervisor(run, Console(file=said, width=200), backend=crew(run, Machine(gpus=(), cores=(0,)))).run()
    assert ending is RunOutcome.INTERRUPTED and not said.lines
    assert not any(is_alive(pid) for role in ("learner", "actor-0") for pid in pids(run, role))


@pytest.mark.parametrize(("handler", "is_left"), [(signal.SIG_IGN, True), (signal.SIG_DFL, False)])
def test_hangup_stops_a_run_but_for_one_that_nohup_started(prepared, handler, is_left):
    before = signal.signal(signal.SIGHUP, handler)
    try:
        run = prepared(learner=["until said"], actor=["serve"])
        snapshot_folder(run.config).mkdir(parents=True)
        said = Impatient("no live actor", number=signal.SIGHUP, file=run.folder / "said")
        ending = Supervisor(run, Console(file=said, width=200), backend=crew(run, Machine(gpus=(), cores=(0,)))).run()
        assert signal.getsignal(signal.SIGHUP) is handler
    finally:
        signal.signal(signal.SIGHUP, before)
    assert not said.lines and ending is (RunOutcome.DONE if is_left else RunOutcome.INTERRUPTED)
    assert not snapshot_folder(run.config).exists()


def start_marked(mark: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"],
        stdin=subprocess.PIPE,
        env=os.environ | {process_tree.RUN_TAG: mark},
    )


def test_orphans_of_this_run_are_ended_before_its_processes_start_and_no_others(prepared):
    run = prepared(learner=["end"], actor=["serve"])
    orphan, bystander = start_marked(f"{run_tag(run.folder)}actor-0"), start_marked("another:actor-0")
    try:
        orphan.send_signal(signal.SIGSTOP)
        ending, said, _ = watch(run)
        assert ending is RunOutcome.DONE
        assert orphan.wait(20) == -signal.SIGKILL and bystander.poll() is None
        assert f"killed process {orphan.pid} (" in said and "of actor-0, left by an earlier start of this run" in said
    finally:
        for process in (orphan, bystander):
            process.kill()
            process.communicate()


def test_start_of_a_copied_folder_leaves_the_live_originals_processes_and_snapshots(prepared, tmp_path):
    copy = prepared(learner=["end"], actor=["serve"])
    original = tmp_path / "original"
    shutil.copytree(copy.folder, original)
    assert run_id(original) == run_id(copy.folder)
    snapshots = snapshot_folder(copy.config)
    snapshots.mkdir(parents=True)
    writer = RunLock(snapshots / "writer", "learner")  # the original's, which publishes there
    child = start_marked(f"{run_tag(original)}learner")
    try:
        assert watch(copy)[0] is RunOutcome.DONE
        assert child.poll() is None and snapshots.is_dir()
    finally:
        writer.release()
        child.kill()
        child.communicate()
    Supervisor(copy, Console(file=io.StringIO()))._stop()
    assert not snapshots.exists()  # a dead writer's are removed


def test_second_supervisor_is_refused_and_ends_nothing_of_the_first(prepared):
    run = prepared(learner=["end"], actor=["serve"])
    child = start_marked(f"{run_tag(run.folder)}learner")
    first = Supervisor(run, Console(file=io.StringIO()))
    try:
        with pytest.raises(ValueError, match="is locked by a running launch.local"):
            Supervisor(run, Console(file=io.StringIO()))
        assert child.poll() is None
    finally:
        first._lock.release()
        child.kill()
        child.communicate()


def test_log_that_can_not_be_written_is_one_line(prepared):
    run = prepared(learner=["end"], actor=["serve"])
    (run.folder / "logs").write_text("")
    ending, _, one = watch(run)
    assert ending is RunOutcome.FAILED and one.last_error == f"{run.folder.resolve() / 'logs'}: File exists"


KILLED_SUPERVISOR = """
import io, sys, pathlib, json
from rich.console import Console
from launch.supervision.child import Child
from launch.startup.prepare_run import open_prepared
from launch.supervision.supervisor import Supervisor
folder = sys.argv[1]
Child.command = lambda self: [sys.executable, "-m", "tests.launch.fake_role", self.role, folder]
Supervisor(open_prepared(folder), Console(file=io.StringIO())).run()
"""


@pytest.mark.heavy
def test_killed_supervisor_takes_stopped_children_along(prepared):
    run = prepared(learner=["serve"], actor=["serve"])
    (run.folder / "model_path.txt").write_text("model\n")
    one = subprocess.Popen(
        [sys.executable, "-c", KILLED_SUPERVISOR, str(run.folder)], cwd=REPO, env=os.environ | {"PYTHONPATH": str(REPO)}
    )
    try:
        started = [run.folder / f"{role}.pids" for role in ("learner", "actor-0")]
        wait_until(lambda: all(p.is_file() and p.read_text().endswith("\n") for p in started), "both run")
        children = [*pids(run, "learner"), *pids(run, "actor-0")]
        for child in children:
            os.kill(child, signal.SIGSTOP)
    finally:
        one.kill()
        one.wait()
    try:
        wait_until(lambda: not any(map(is_alive, children)), "the children's end", deadline_s=60)
    finally:
        process_tree.kill_leftovers(lambda mark: mark.startswith(run_tag(run.folder)))
