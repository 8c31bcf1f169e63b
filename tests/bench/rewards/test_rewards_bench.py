"""The bench of rewards: its draws, what it makes of its rounds, and that it runs."""

import collections
import json
import subprocess
import sys

import numpy as np
import pytest

from tests.actor.sandbox.conftest import isolated as isolated
from tests.bench.rewards.arms import ADAPTIVE, ARMS, OWN
from tests.bench.rewards.workload import CASE_S, HANG_SHARE, SAMPLES, SMALL, WHOLE, Workload
from tests.integration.support.processes import REPO

WORK = Workload(size=WHOLE)


def test_answers_hang_as_often_as_is_said_and_others_are_right_or_wrong():
    drawn = collections.Counter(WORK.kind(0, 0, prompt, sample) for prompt in range(5000) for sample in range(2))
    assert abs(drawn["hang"] / 10_000 - HANG_SHARE) < 0.01
    assert abs(drawn["right"] / 10_000 - 0.475) < 0.02


def test_lengths_are_the_papers():
    """Section 2.2's P75 of 755 to 1.1k tokens in short rounds, the longest 16k / 8.9; 8k at most in long ones."""
    for round_, kind in enumerate(WHOLE.period):
        lengths = [
            WORK.lengths(round_).tokens(np.array([0, round_, prompt], np.int32), sample)
            for prompt in range(500)
            for sample in range(SAMPLES)
        ]
        if kind == "short":
            assert 755 <= np.percentile(lengths, 75) <= 1100 and max(lengths) == 1841
        else:
            assert max(lengths) == 8192 and np.median(lengths) > 3000


def test_times_of_test_cases_are_the_tasks_own_divided_by_the_speed():
    slow, fast = Workload(size=WHOLE), Workload(size=SMALL)
    times = [slow.case_s(0, prompt) for prompt in range(200)]
    assert CASE_S[0] / 2 <= min(times) and max(times) <= CASE_S[1] / 2
    assert slow.case_s(0, 3) * WHOLE.speed == pytest.approx(fast.case_s(0, 3) * SMALL.speed)


@pytest.mark.integration
def test_small_bench_runs_all_arms_and_ends_in_the_line(isolated, tmp_path):
    """Its numbers mean nothing; that hanging answers are timeouts and nothing else is does."""
    ran = subprocess.run(
        [sys.executable, "-m", "tests.bench.rewards", "--small", f"--results_dir={tmp_path}"],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ran.returncode == 0, ran.stderr
    line = json.loads(ran.stdout.splitlines()[-1])
    assert line["bench"] == "rewards"
    assert line["aims"].keys() == {
        "adaptive_speedup",
        "exposed_share",
        "own_solutions_exposed_share",
        "sandbox_added_ms",
    }
    written = json.loads((tmp_path / "rewards.json").read_text())
    work = Workload(size=SMALL)
    kinds = collections.Counter(
        work.kind(0, round_, prompt, sample)
        for round_ in range(len(SMALL.period))
        for prompt in range(SMALL.prompts)
        for sample in range(SAMPLES)
    )
    assert kinds["hang"] > 0
    for arm in ARMS:
        verdicts = collections.Counter()
        for one in written["steps"][arm]:
            verdicts.update(one["verdicts"])
            assert one["combined_s"] >= one["rollout_s"] > 0
        # A busy machine may be slower than the least timeout, divided as it is.
        late = verdicts["timeout"] - kinds["hang"] if arm in (ADAPTIVE, OWN) else 0
        assert late >= 0 and verdicts.total() == kinds.total()
        assert late or verdicts == {"ok": kinds["right"], "wrong": kinds["wrong"], "timeout": kinds["hang"]}
