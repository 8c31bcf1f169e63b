"""Paced engines with the speeds of the papers' GPUs: the roofline of their inputs, in the rig's tokens."""

import types

import pytest

from tests.bench import paced
from tests.bench.paced import LONGEST, MAX_RESPONSE, SERIAL, engine_of
from tests.bench.papers import inputs
from tests.bench.rig.calibrate import Calibration


def test_engine_reads_weights_and_caches_once_a_step():
    engine = engine_of(LONGEST, max_num_seqs=200)
    alone, many = (engine.throughput(h) / h for h in (1, 64))
    weights_s = 2 * LONGEST.params / (LONGEST.tensor_parallel_size * inputs.HBM_BYTES_PER_S)
    assert 0.9 / weights_s < alone < 1 / weights_s  # a cache of one sequence adds little
    assert 0.5 * alone < many < alone  # others' caches are read too: memory bounds, not computation


def test_engine_for_several_is_as_fast_with_as_many_times_the_sequences():
    one, four = (engine_of(LONGEST, max_num_seqs=200, num_engines=n) for n in (1, 4))
    for h in (1, 8, 32):
        assert four.throughput(4 * h) == pytest.approx(4 * one.throughput(h))
    assert four.kv_capacity_tokens == pytest.approx(4 * one.kv_capacity_tokens, abs=4)


def test_cache_holds_as_many_of_the_longest_responses_as_the_papers():
    engine = engine_of(LONGEST, max_num_seqs=200)
    wanted = LONGEST.kv_capacity_tokens / LONGEST.max_tokens
    assert engine.kv_capacity_tokens / MAX_RESPONSE == pytest.approx(wanted, rel=0.01)


def test_synchronous_run_has_two_engines_and_the_others_one():
    assert paced.async_session(SERIAL, 2).num_engines == 2
    assert {paced.async_session(alpha, 2).num_engines for alpha in paced.ALPHAS} == {1}


def test_cost_paid_counts_micro_batches_own_passes():
    ran = types.SimpleNamespace(num_passes=12, real_tokens=4000)
    free = Calibration(passes_per_token=0.0, bounds=(0.7, 0.8), results={SERIAL: ran})  # pyright: ignore[reportArgumentType]
    assert paced.cost_paid(free) == 12 / 4000
