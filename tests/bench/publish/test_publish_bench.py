"""What the bench makes of what its parts found, and one small part for real."""

import pytest

from tests.bench.publish import report
from tests.bench.publish.__main__ import jobs
from tests.bench.publish.sizes import SIZES

PARTS = {
    "local 0.3B 1": {"publish_over_memcpy": 0.6, "attach_s": 0.001},
    "local 1.2B 1": {"publish_over_memcpy": 0.55, "attach_s": 0.002},
    "local 0.3B 2": {"publish_over_memcpy": 0.7, "attach_s": 0.001},
    "network 0.3B": {"network_over_memcpy": 0.3, "network_tls_over_memcpy": 0.2},
    "link 0.3B": {"pause_ratio_slow_link": 1.0},
    "held 0.3B": {"learner_held_up_share": 0.06, "slowdown_beside": 1.1},
    "delta": {"delta_ratio_lr1e-6": 25.0, "delta_ratio_lr1e-5": None},
    "swap": {"swap_pause_over_memcpy": 1.5, "swap_check_cpu_s": 1.2},
}


def test_values_are_the_worst_of_the_sizes_and_aims_say_what_is_met():
    values = report.values_of(PARTS)
    assert values["publish_over_memcpy"] == 0.55 and values["attach_ms"] == 2.0
    met = {key: aim["met"] for key, aim in report.aims_of(values).items()}
    assert met == {
        "publish_over_memcpy": True,
        "publish_over_memcpy_2": True,
        "attach_ms": True,
        "network_over_memcpy": False,
        "network_tls_over_memcpy": True,
        "pause_ratio_slow_link": True,
        "learner_held_up_share": False,
        "delta_ratio_lr1e-6": True,
        "delta_ratio_lr1e-5": False,
        "swap_pause_over_memcpy": True,
        "swap_check_cpu_s": False,
    }
    assert "not measured" in report.page(PARTS, values, "here")


def test_two_cores_that_are_no_faster_than_one_do_not_meet_their_aim():
    slow = PARTS | {"local 0.3B 2": {"publish_over_memcpy": 0.52}}
    assert not report.aims_of(report.values_of(slow))["publish_over_memcpy_2"]["met"]


def test_jobs_of_parts_that_are_not_there_are_refused():
    assert set(jobs(["held", "delta", "swap"], ["0.3B"])) == {"held 0.3B", "delta", "swap"}
    with pytest.raises(ValueError, match="locla"):
        jobs(["locla"], ["0.3B"])


@pytest.mark.parametrize(("name", "wanted"), [("0.3B", 0.303e9), ("1.2B", 1.2e9)])
def test_sizes_have_the_parameters_that_they_are_named_after(name, wanted):
    assert SIZES[name].num_parameters == pytest.approx(wanted, rel=0.01)
    assert set(SIZES[name].shapes) == set(SIZES[name].names.paths())
