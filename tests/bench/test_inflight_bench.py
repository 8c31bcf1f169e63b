"""What the in-flight bench makes of its sessions."""

from typing import Any

import pytest

from launch.tools.plan.sim.simulate import default_warmup
from tests.bench import inflight
from tests.bench.inflight import CONVENTIONAL, KEEP, MAX_NUM_SEQS, RECOMPUTE, Row
from tests.bench.rig.rig import Result


def result_of(*, update_s: float, running: int, num_updates: int = 10) -> Result:
    """Updates of 32 samples of 50 tokens, one every `update_s`; the engine fills at the sixth, with `running`."""
    ends = [update_s * (n + 1) for n in range(num_updates)]
    step: dict[str, Any] = {
        "sequences": 32,
        "tokens": 1600,
        "response/mean_tokens": 50.0,
        "lag/max": 3,
        "lag/mean": 1.5,
        "ess": 0.9,
        "mismatch_kl_k3": 1e-3,
        "actor/pause_s": 0.02,
    }
    applied = [{"name": "apply", "ts": 1e6 * end, "dur": 0.0} for end in ends]
    return Result(
        rounds=[],
        steps=[step] * num_updates,
        evals=[],
        events=[{"name": "issue", "ts": 0.0}, *applied],
        num_passes=1,
        num_micro_batches=1,
        real_tokens=1,
        step_cpu_s=[],
        dropped={},
        running=[(0.0, 1), (ends[5], running), (ends[-1], 0), (ends[-1] + 9, 0)],
    )


def rows_of(running: int) -> dict[str, Row]:
    config = inflight.pipelinerl(10, recompute=False)
    assert default_warmup(config) < 6
    slow = Row.of(config, [result_of(update_s=3.0, running=8)])
    return {KEEP: Row.of(config, [result_of(update_s=1.0, running=running)]), CONVENTIONAL: slow, RECOMPUTE: slow}


def test_engine_fill_is_of_the_steady_state_over_the_places():
    values = inflight.values_of(rows_of(31))
    # From the end of update 4 to that of update 10: two seconds with 1 running, four with 31.
    assert values["engine_fill"] == pytest.approx((2 * 1 + 4 * 31) / 6 / MAX_NUM_SEQS)
    assert values["engine_fill_conventional"] == pytest.approx((2 * 1 + 4 * 8) / 6 / MAX_NUM_SEQS)


def test_rates_are_samples_and_response_tokens_of_the_same_run():
    values = inflight.values_of(rows_of(32))
    assert values["samples_per_s_pipelinerl"] == pytest.approx(32.0)
    assert values["tokens_per_s_pipelinerl"] == pytest.approx(1600.0)
    for rate in ("samples", "tokens"):
        assert values[f"{rate}_per_s_ratio_same_lag"] == pytest.approx(3.0)


def test_every_row_has_its_line():
    table = inflight.table_of(rows_of(32))
    assert [len(line) for line in table.rows] == [len(table.columns)] * 3
