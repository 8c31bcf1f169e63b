"""Processes whose node, or whose station there, is gone or fails; and a driver that is told to end while it waits."""

import errno
import io
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from bridge.liveness import Activity
from configs import overrides
from configs.run_folder import set_up_run
from configs.schema import Config
from configs.sections import (
    ActorConfig,
    LearnerConfig,
    MeshConfig,
    PackingConfig,
    PromptsConfig,
    PublishConfig,
    RunConfig,
    StoreConfig,
)
from launch.ray.resources import parse
from launch.startup.prepare_run import PreparedRun
from launch.supervision.supervisor import RunOutcome, Supervisor
from tests.launch.ray.fake_ray import SILENCE, Berths, FakeStation, put_in

pytest.importorskip("ray")
import ray.exceptions

from launch.ray import ray_backend as ray_crew
from launch.ray import remote_process
from launch.ray.node_agent import ProcessStatus
from launch.ray.ray_backend import RayBackend
from launch.ray.remote_process import RemoteProcess

CPU = parse("cpu", flag="learner_on")
PLACE_S = 600.0
GONE = ray.exceptions.RayActorError()
NO_SPACE = ray.exceptions.RayTaskError(
    "Station.start()", "a traceback", OSError(errno.ENOSPC, "No space left on device")
).as_instanceof_cause()
RUNS, ENDED = ProcessStatus(None, 7, Activity.WORKING, "", b""), ProcessStatus(0, 7, Activity.WORKING, "", b"")


def well(look: ProcessStatus | Callable[[], ProcessStatus], **given: object) -> FakeStation:
    """A station whose node is as it should be."""
    return FakeStation(**{"where": ("node", "10.0.0.1", "3.12"), "free_port": 7000, "sees": True, "look": look} | given)


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (remote_process, ray_crew):
        put_in(monkeypatch, module)
    monkeypatch.setattr(remote_process, "LOOK_EVERY_S", 0.01)


@pytest.fixture
def prepared(tmp_path: Path) -> PreparedRun:
    config = Config(
        preset="test",
        run=RunConfig(dir=str(tmp_path / "run")),
        mesh=MeshConfig(fsdp=2),
        packing=PackingConfig(rows=2),
        learner=LearnerConfig(num_processes=2),
        actor=ActorConfig(max_restarts=2),
        prompts=PromptsConfig(verifier="judge:score"),
        store=StoreConfig(url="postgresql://learner@store.example/sluice"),
        publish=PublishConfig(bucket="file:///shared"),
    )
    return PreparedRun(config, set_up_run(config), tmp_path / "model")


def test_cause_of_an_exit_is_not_an_error_of_an_earlier_process(tmp_path):
    log = tmp_path / "actor-0.log"
    log.write_text("ValueError: of an earlier process\n")
    killed = ProcessStatus(-9, 7, Activity.WORKING, "", b"loading weights\n")
    looks = iter((killed, ENDED))
    station = well(lambda: next(looks))
    process = RemoteProcess("actor-0", [], log, take=lambda: station, asked="1 CPU", placement_timeout_s=PLACE_S)
    process.start()
    process._look()
    assert process.last_error() == "loading weights"


def crew_of(
    prepared: PreparedRun,
    monkeypatch: pytest.MonkeyPatch,
    first: Berths,
    second: Berths,
    actor: Berths,
    *,
    ready: object = 0,
) -> RayBackend:
    """The run's: where its two learner processes and its actor may be, and what is heard of the learner's places."""
    berths = SimpleNamespace(group=SimpleNamespace(ready=lambda: ready), close=lambda: None)
    monkeypatch.setattr(ray_crew, "LearnerPlacementGroup", lambda *_, **__: berths)
    made = RayBackend(
        prepared.config,
        prepared.folder,
        learner_on=CPU,
        actors_on=CPU,
        actor_store="postgresql://actor@store.example/sluice",
        placement_timeout_s=PLACE_S,
        console=None,
    )
    for child, places in zip((*made._learners, *made.actors), (first, second, actor), strict=True):
        assert isinstance(child, RemoteProcess)
        child._take, child._resources = places.take, str(places)
    return made


def run(prepared: PreparedRun, crew: RayBackend) -> tuple[RunOutcome, str, str]:
    """How it ended, what was said, and the last error."""
    said = io.StringIO()
    one = Supervisor(prepared, Console(file=said, width=300), backend=crew)
    return one.run(), said.getvalue(), one.last_error


def test_actors_may_import_the_verifier_that_the_drivers_user_named(prepared, monkeypatch):
    from launch.startup import join_run

    (actor,) = crew_of(prepared, monkeypatch, *(Berths(),) * 3).actors
    assert isinstance(actor, RemoteProcess)
    allowed = [a.removeprefix("--allow_module=") for a in actor._arguments if a.startswith("--allow_module=")]
    card: Any = SimpleNamespace(name="mine", config=overrides.to_json(prepared.config))
    assert join_run.config_of(card, {}, allowed).prompts.verifier == "judge:score"


def test_actor_that_is_told_to_end_hands_over_within_the_configs_grace(prepared, monkeypatch):
    (actor,) = crew_of(prepared, monkeypatch, *(Berths(),) * 3).actors
    assert isinstance(actor, RemoteProcess)
    assert not [a for a in actor._arguments if a.startswith("--shutdown_grace_s")]


def test_learner_whose_station_is_lost_before_its_start_begins_anew_elsewhere(prepared, monkeypatch):
    first = Berths(well(RUNS, free_port=GONE), well(ENDED))
    crew = crew_of(prepared, monkeypatch, first, Berths(well(ENDED)), Berths(well(ENDED)))
    ending, said, _ = run(prepared, crew)
    assert ending is RunOutcome.DONE and not first.left
    assert "lost its node or its node agent" in said and "restarting (restart 1)" in said


def test_learner_that_finds_no_station_that_lives_is_started_again_as_often_as_the_config_says(prepared, monkeypatch):
    first = Berths(*(well(RUNS, free_port=GONE) for _ in range(4)))
    crew = crew_of(prepared, monkeypatch, first, Berths(well(ENDED)), Berths(well(ENDED)))
    ending, _, last_error = run(prepared, crew)
    assert ending is RunOutcome.FAILED and len(first.left) == 1
    assert "lost its node or its node agent" in last_error and "(after 2 restarts" in last_error


def test_station_that_is_lost_while_the_folder_is_looked_for_is_replaced_at_the_start(prepared, monkeypatch):
    first = Berths(well(RUNS, sees=GONE), well(ENDED))
    crew = crew_of(prepared, monkeypatch, first, Berths(well(ENDED)), Berths(well(ENDED)))
    ending, said, _ = run(prepared, crew)
    assert ending is RunOutcome.DONE and not first.left
    assert "learner: lost its node or its node agent" in said and "; restarting" not in said


def test_actor_whose_node_has_no_space_is_started_again_and_the_run_goes_on(prepared, monkeypatch):
    full = well(RUNS, start=NO_SPACE)
    places = Berths(full, well(ENDED))
    learner = well(lambda: RUNS if places.left else ENDED)  # done once the actor is elsewhere
    crew = crew_of(prepared, monkeypatch, Berths(learner), Berths(well(ENDED)), places)
    ending, said, _ = run(prepared, crew)
    assert ending is RunOutcome.DONE
    assert "actor-0 was killed by signal 9: its node failed (OSError: [Errno 28] No space left on device" in said
    assert "close" in full.calls  # the station lives: what it has there goes


@pytest.mark.parametrize("silent", ["group", "where", "free_port"])
def test_driver_that_is_interrupted_while_it_waits_for_the_cluster_ends(prepared, monkeypatch, silent):
    def interrupt(waits_s: float) -> None:
        waited.append(waits_s)
        signal.raise_signal(signal.SIGINT)

    waited: list[float] = []
    put_in(monkeypatch, remote_process, waiting=interrupt)
    places = Berths(well(ENDED, **{silent: SILENCE}))
    crew = crew_of(
        prepared,
        monkeypatch,
        places,
        *(Berths(well(ENDED)) for _ in range(2)),
        ready=SILENCE if silent == "group" else 0,
    )
    ending, said, _ = run(prepared, crew)
    assert ending is RunOutcome.INTERRUPTED and "shutting down" in said
    assert len(waited) == 1 and waited[0] < 1.0 < PLACE_S


def test_process_for_which_there_is_no_place_any_more_ends_the_run_with_a_line(prepared, monkeypatch):
    first = Berths(well(RUNS, start=SILENCE))
    crew = crew_of(prepared, monkeypatch, first, Berths(well(ENDED)), Berths(well(ENDED)))
    crew._learners[0]._placement_timeout_s = 0.0
    ending, _, last_error = run(prepared, crew)
    assert ending is RunOutcome.FAILED and "timed out after 0 s waiting for resources for learner (1 CPU)" in last_error
