"""How an engine's processes start and end; tests/integration/test_actor_process.py counts those of a real one."""

import gc
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from actor.vllm.engine_setup import bound_threads, skip_exit_gc, tune_gc


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
