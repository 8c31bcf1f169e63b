"""The main job with two real engines on this machine: each schedule over both, and one of them killed."""

import contextlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.integration.support import jobs
from tests.integration.support.processes import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.engine, pytest.mark.usefixtures("all_cores")]

NUM_HELD_OUT = 32
TWO: dict[str, Any] = {
    "actor__num_engines": 2,
    "evaluation__num_problems": NUM_HELD_OUT,
    "publish__probe_every_n_publishes": 0,
}


def makers(job: jobs.Job) -> dict[str, int]:
    """How many training tickets each actor made, by its role."""
    summary = json.loads((job.folder / "summary.json").read_text())
    return {role: made["tickets"] for role, made in summary["engines"].items()}


def pids(job: jobs.Job) -> dict[str, int]:
    """Of the actors that serve, by name."""
    assert job.process.poll() is None, f"the job ended\n{job.logs()}"
    if not (job.folder / "store.sqlite").is_file():
        return {}  # not to be made by us
    return {b.process: b.pid for b in job.heartbeats() if b.role == "actor" and b.report is not None}


def handed_in(job: jobs.Job) -> dict[str, int]:
    """How many groups each actor that serves has said that it handed in."""
    assert job.process.poll() is None, f"the job ended\n{job.logs()}\n{job.heartbeats()}"
    return {b.process: b.report.num_groups for b in job.heartbeats() if b.role == "actor" and b.report is not None}


def cores(pid: int) -> dict[str, set[int]]:
    """On which cores a process and those that it started may run, by what they are called."""
    found: dict[str, set[int]] = {}
    for each in [pid, *jobs.descendants(pid)]:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            command = Path(f"/proc/{each}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            found[f"{each}: {command}"] = os.sched_getaffinity(each)
    return found


def test_two_engines_serve_one_run_and_one_that_is_killed_is_started_again_alone(tmp_path: Path, model: Path):
    # It goes on until both have made something, however late one of them begins, and is then told to stop.
    job = jobs.start(
        tmp_path / "run",
        model,
        run__num_updates=4000,
        rounds__groups_per_round=16,
        sampling__max_response_tokens=40,
        model__max_tokens=64,
        **TWO,
    )
    try:
        wait_until(lambda: len(pids(job)) == 2, f"two engines\n{job.logs()}", deadline_s=600)
        before = pids(job)
        bound = {name: cores(pid) for name, pid in before.items()}
        wait_until(lambda: all(handed_in(job).values()), "a group of each", deadline_s=600)
        jobs.sigkill(before["actor-1"])
        wait_until(lambda: handed_in(job).get("actor-1-r1", 0) > 0, "a group of its successor", deadline_s=600)
        job.process.send_signal(signal.SIGINT)
        output, _ = job.process.communicate(timeout=120)
    finally:
        job.end()
    assert job.process.returncode == 130, output
    of_0, of_1 = (set().union(*bound[name].values()) for name in ("actor-0", "actor-1"))
    assert of_0 and of_1 and not of_0 & of_1, bound  # else they hold each other up
    assert output.count("; restarting") == 1 and "actor-1 was killed by signal 9" in output
    jobs.check_every_group_trained_once(job, num_updates=len(job.rows("step")), per_update=2, by_window=True)
    made = makers(job)
    assert made["actor-0"] > 0 and made["actor-1"] > 0
    starts = {e["args"]["name"] for e in job.events("process_name")}
    assert starts >= {"learner", "actor-0", "actor-1"} and "actor-0-r1" not in starts


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("preset", "fields"),
    [
        ("rollpacker", dict(rounds__groups_per_round=8, rounds__groups_per_update=8)),
        ("roll_flash", dict(rounds__overprovision_samples=1.5)),
        ("rolloutpipe", {}),
    ],
)
def test_schedules_over_two_engines_train_every_update_whole(
    tmp_path: Path, model: Path, preset: str, fields: dict[str, Any]
):
    # It goes on until both have made something, however late one of them begins, and is then told to stop.
    given: dict[str, Any] = {"run__num_updates": 4000} | TWO | fields
    job = jobs.start(tmp_path / "run", model, config=f"{preset}:tiny", **given)

    def have_made() -> bool:
        assert job.process.poll() is None, f"the job ended\n{job.logs()}"
        if len(job.rows("step")) < 12:
            return False
        made = handed_in(job)
        return len(made) == 2 and min(made.values()) > NUM_HELD_OUT  # which one of them may have had all of

    try:
        wait_until(have_made, f"groups of both\n{job.logs()}", deadline_s=600)
        job.process.send_signal(signal.SIGINT)
        job.process.communicate(timeout=120)
    finally:
        job.end()
    assert job.process.returncode == 130
    rows = job.rows("step")
    trained = [group for row in rows for group in row["groups"]]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1)) and len(trained) == len(set(trained))
    made = makers(job)
    assert made.keys() == {"actor-0", "actor-1"} and min(made.values()) > 0


@pytest.mark.nightly
def test_engine_of_two_processes_serves_a_run_and_is_started_again_when_one_of_them_dies(tmp_path: Path, model: Path):
    job = jobs.start(
        tmp_path / "run",
        model,
        run__num_updates=80,
        rounds__groups_per_round=16,
        sampling__max_response_tokens=40,
        model__max_tokens=64,
        actor__tensor_parallel_size=2,
    )
    try:
        job.wait_for_step(1)
        actor = pids(job)["actor-0"]
        workers = [p for p in jobs.descendants(actor) if "Worker" in Path(f"/proc/{p}/comm").read_text()]
        jobs.sigkill(workers[-1])
        output = job.finish()
    finally:
        job.end()
    assert len(workers) == 2
    assert output.count("; restarting") == 1 and "actor-0 exited with code 1" in output
    jobs.check_every_group_trained_once(job, num_updates=80, per_update=2)
    probes = job.rows("probe")
    assert probes and max(p["parity/max_abs_dlogprob"] for p in probes) <= 1e-4
    wait_until(lambda: not any(map(jobs.is_alive, workers)), "the end of the first engine's processes")
