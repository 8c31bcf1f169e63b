"""A supervisor over real processes that do what the test says."""

import io
import pathlib
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from rich.console import Console

from bridge import timeline
from bridge.liveness import Activity
from configs.run_folder import RunFolder
from configs.sections import ActorConfig
from launch import cli
from launch.startup.prepare_run import PreparedRun
from launch.supervision import supervisor
from launch.supervision.backend import LocalBackend
from launch.supervision.child import Child
from launch.supervision.placement import Machine
from launch.supervision.supervisor import RunOutcome, Supervisor
from tests.integration.support.jobs import is_alive
from tests.integration.support.processes import wait_until


class Said(io.StringIO):
    """What a supervisor prints; once `what` is printed, `file` is there."""

    def __init__(self, what: str, file: pathlib.Path) -> None:
        super().__init__()
        self.what, self.file = what, file

    def write(self, text: str) -> int:
        if self.what in text:
            self.file.touch()
        return super().write(text)


def crew(prepared: PreparedRun, machine: Machine) -> LocalBackend:
    return LocalBackend(prepared.config, prepared.folder.resolve(), machine)


def watch(prepared: PreparedRun, *, what: str = "nothing") -> tuple[RunOutcome, str, Supervisor]:
    said = Said(what, prepared.folder / "said")
    one = Supervisor(prepared, Console(file=said, width=200), backend=crew(prepared, Machine(gpus=(), cores=(0, 1))))
    return one.run(), said.getvalue(), one


def pids(prepared: PreparedRun, role: str) -> list[int]:
    """Processes of a role that have begun; one that is ended at once has not."""
    file = prepared.folder / f"{role}.pids"
    return [int(line) for line in file.read_text().split()] if file.exists() else []


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
