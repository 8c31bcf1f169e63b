"""Which runs the presets bench makes, which it takes as finished, and what it says of a part of them."""

from typing import Any

import pytest

from configs import overrides
from tests.bench.presets import __main__ as presets
from tests.bench.presets import table
from tests.bench.presets.cases import CASES, COMPARISONS, LOSSES, PRESETS
from tests.configs.test_overrides import PRESETS as KNOWN


def result(start: float, end: float) -> dict[str, Any]:
    return {
        "held_out_reward_start": start,
        "held_out_reward_end": end,
        "held_out": [[0, start], [240, end]],
        "trained_samples": 30720,
        "lag_mean": 0.5,
        "lag_max": 1,
        "ess": 0.99,
        "mismatch_kl": 1e-3,
        "max_parity": None,
        "dropped": 0,
        "wall_s": 100.0,
    }


def all_results(**ends: float) -> dict[str, dict[str, Any]]:
    return {name: result(0.3, ends.get(name, 0.7)) for name in CASES}


def test_every_preset_that_comes_in_sizes_is_a_case():
    assert set(KNOWN) <= set(PRESETS) <= set(CASES)
    assert "tiny" not in PRESETS and not any(name.startswith("tpu") for name in PRESETS)


@pytest.mark.parametrize("name", CASES)
def test_each_case_is_a_configuration(name):
    config_file, fields = presets.asked(CASES[name], 14)
    config = overrides.apply(overrides.load_preset(config_file), {field: str(value) for field, value in fields.items()})
    assert (config.preset, config.run.num_updates, config.run.seed) == (CASES[name].preset, 14, CASES[name].seed)


def test_losses_that_are_compared_differ_in_their_loss_alone():
    pairs = [pair for comparison in COMPARISONS for pair in comparison.pairs if pair[0] in LOSSES]
    assert len(pairs) == 3
    for case, other in pairs:
        changed = {k: v for k, v in LOSSES[case].items() if LOSSES[other].get(k) != v}
        assert changed and all(field.startswith("loss.") for field in changed)
        assert set(LOSSES[other]) <= set(LOSSES[case])


def test_rollpacker_is_held_against_serial_seed_by_seed():
    ends = {"serial": 0.70, "rollpacker": 0.70, "serial_seed_1": 0.72, "rollpacker_seed_1": 0.66}
    values = table.values_of(all_results(**ends, serial_seed_2=0.70, rollpacker_seed_2=0.67))
    assert values["rollpacker_minus_serial"] == pytest.approx((0.0 - 0.06 - 0.03) / 3)
    assert values["rollpacker_minus_serial_std"] == pytest.approx(0.03)
    assert values["rollpacker_minus_serial_pairs"] == 3
    assert table.aims_of(values)["rollpacker_minus_serial"]["met"]
    worse = table.values_of(all_results(rollpacker=0.6, rollpacker_seed_1=0.66))
    assert not table.aims_of(worse)["rollpacker_minus_serial"]["met"]
