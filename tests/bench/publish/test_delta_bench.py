"""What the deltas' part of the publish bench makes of what it measures."""

import ml_dtypes
import numpy as np
import pytest

from tests.bench.publish import delta, smollm2


def step_of(share, size=200_000):
    """Values in bfloat16, before and after some of them moved by one unit in the last place."""
    rng = np.random.default_rng(0)
    before = rng.normal(0, 0.02, size).astype(ml_dtypes.bfloat16)
    after = (before.view(np.uint16) + (rng.random(size) < share)).astype(np.uint16)
    return {"w": before.view(np.int16)}, {"w": after.view(np.int16)}


def test_step_is_measured_as_it_is_published_and_fetched(monkeypatch):
    def steps(into):
        for rate, share in (("1e-6", 0.005), ("1e-5", 0.03)):
            before, after = step_of(share)
            np.savez(into / f"before-{rate}.npz", allow_pickle=False, **before)
            np.savez(into / f"after-{rate}.npz", allow_pickle=False, **after)
        return {rate: (into / f"before-{rate}.npz", into / f"after-{rate}.npz") for rate in ("1e-6", "1e-5")}

    monkeypatch.setattr(smollm2, "steps", steps)
    values = delta.measure()
    assert values["delta_changed_share_lr1e-6"] == pytest.approx(0.005, rel=0.2)
    assert values["delta_full_bytes_lr1e-6"] == 400_000
    assert values["delta_ratio_lr1e-6"] == 400_000 / values["delta_bytes_lr1e-6"]
    assert values["delta_ratio_lr1e-6"] > values["delta_ratio_lr1e-5"] > 8
    assert all(values[f"delta_{name}_s_lr1e-5"] > 0 for name in ("make", "apply", "full_apply"))
