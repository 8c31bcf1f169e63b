"""A learner of several processes: the losses of one, whatever the mesh, and what becomes of it when one dies."""

import signal
import time
from collections.abc import Generator
from pathlib import Path

import numpy as np
import pytest

from tests.integration.support import hosts_jobs
from tests.integration.support.processes import wait_until
from tests.integration.support.recorded_actor import recorded_actor

pytestmark = pytest.mark.integration
ALL_END_S = 30.0
"""Within which all processes end once one was killed; twice supervision.heartbeat_timeout_s is below it."""


@pytest.fixture
def run(tmp_path: Path) -> Generator[Path]:
    """The folder of a run whose tickets are answered."""
    folder = tmp_path / "run"
    with recorded_actor(folder / "store.sqlite"):
        yield folder


def trained(folder: Path, model: Path, **options) -> np.ndarray:
    """The losses and gradient norms of a whole run."""
    job = hosts_jobs.start(folder, model, **options)
    try:
        job.finish()
    finally:
        job.end()
    return hosts_jobs.losses_of(job)


def trained_alone(folder: Path, model: Path, **options) -> np.ndarray:
    """The same groups on one process with one device."""
    with recorded_actor(folder / "store.sqlite"):
        return trained(folder, model, count=1, devices_each=1, **options)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, model: Path) -> np.ndarray:
    """Of the run that all others but the last are held against."""
    return trained_alone(tmp_path_factory.mktemp("alone") / "run", model)


def check_same(got: np.ndarray, want: np.ndarray) -> None:
    assert got.shape == want.shape == (8, 2)
    print(f"largest difference {np.abs(got - want).max():.2g}")
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def wait_for_checkpoint(job: hosts_jobs.HostsJob, step: int) -> None:
    manifest = job.folder / "checkpoints.hashes" / f"{step}.json"

    def there() -> bool:
        assert all(p.poll() is None for p in job.processes), job.logs()
        return manifest.is_file()

    wait_until(there, f"checkpoint {step}", deadline_s=600.0)


@pytest.mark.parametrize(
    "killed", [pytest.param(0, id="leader", marks=pytest.mark.nightly), pytest.param(1, id="follower")]
)
def test_two_processes_one_of_them_killed_all_end_and_the_next_start_goes_on_to_the_losses_of_one(
    run: Path, alone: np.ndarray, model: Path, killed: int
):
    job = hosts_jobs.start(run, model, count=2, devices_each=1, mesh__fsdp=2, run__num_updates=2000)
    try:
        wait_for_checkpoint(job, 4)
        job.signal(killed, signal.SIGKILL)
        start = time.monotonic()
        codes = job.wait(ALL_END_S)
        print(f"all ended {time.monotonic() - start:.1f} s after the kill with codes {codes}")
        assert codes[killed] == -signal.SIGKILL and 0 not in codes
        before = job.losses()
        job = hosts_jobs.start(run, model, count=2, devices_each=1, mesh__fsdp=2, run__num_updates=2000)
        last = max(before) + 4
        wait_until(lambda: max(job.losses()) >= last, f"step {last}", deadline_s=600.0)
        job.signal(1, signal.SIGTERM)  # whoever is asked, all end together, by code
        assert job.wait(120.0) == [3, 3], job.logs()
    finally:
        job.end()
    losses = job.losses()
    if max(losses) % 2 == 0:  # a round's end
        assert (run / "checkpoints.hashes" / f"{max(losses)}.json").is_file()
    assert sorted(losses) == list(range(1, max(losses) + 1))
    check_same(np.array([losses[step] for step in range(1, 9)]), alone)


MESHES = {
    "fsdp": dict(mesh__fsdp=4),
    "data x fsdp": dict(mesh__data=2, mesh__fsdp=2),
    "tensor": dict(mesh__tensor=4),
    "fsdp x tensor": dict(mesh__fsdp=2, mesh__tensor=2),
}


@pytest.mark.nightly
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("mesh", MESHES)
def test_processes_of_any_number_and_mesh_have_the_losses_of_one_device(
    run: Path, alone: np.ndarray, model: Path, mesh: str, count: int
):
    check_same(trained(run, model, count=count, devices_each=4 // count, **MESHES[mesh]), alone)


@pytest.mark.nightly
@pytest.mark.parametrize("count", [2, 1])
def test_checkpoint_of_four_processes_is_gone_on_from_by_fewer(run: Path, alone: np.ndarray, model: Path, count: int):
    first = trained(run, model, count=4, devices_each=1, mesh__fsdp=4, run__num_updates=4)
    hashed = (run / "checkpoints.hashes" / "4.json").read_text()
    assert all(f"ocdbt.process_{i}/" in hashed for i in range(4))
    got = trained(run, model, count=count, devices_each=1, mesh__fsdp=count)
    assert first.shape == (4, 2)
    np.testing.assert_array_equal(got[:4], first)
    check_same(got, alone)


@pytest.mark.nightly
def test_two_passes_and_a_frozen_policy_over_processes_have_the_losses_of_one_device(
    run: Path, tmp_path: Path, model: Path
):
    options = {"loss__name": "tis", "loss__proximal": "round", "rounds__epochs": 2, "loss__kl_coef": 0.1}
    got = trained(run, model, count=2, devices_each=2, mesh__fsdp=2, mesh__data=2, **options)
    check_same(got, trained_alone(tmp_path / "alone", model, **options))
