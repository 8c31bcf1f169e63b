"""The ledger under any order of calls: no micro-batch is in an update's gradient twice, and none is missing."""

import functools

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from learner.gradient_helper.gradient_ledger import OWN, GradientLedger, LedgerError

STEPS = st.lists(
    st.tuples(st.sampled_from(["add", "assign", "own", "merge", "lose", "late"]), st.integers(0, 3)), max_size=60
)


@given(steps=STEPS)
@example(steps=[("add", 0), ("add", 0), ("assign", 0), ("lose", 0), ("assign", 1), ("merge", 1)])
def test_every_micro_batch_is_merged_once_whatever_is_lost(steps):
    """A part is assigned to, merged and lost in any order; answers of lost and merged parts come late."""
    ledger, merged = GradientLedger(), []
    parts = [f"part{i}" for i in range(4)]
    closed: set[str] = set()

    def merge(part):
        numbers = ledger.of(part)
        ledger.check(part, numbers, float(sum(numbers)))
        merged.extend(ledger.merge(part))
        closed.add(part)

    num = 0
    for what, index in steps:
        part = parts[index]
        if what == "add":
            assert ledger.add(float(num)) == num
            num += 1
        elif what == "own":
            if (number := ledger.assign(OWN)) is not None:
                merged.append(number)
        elif what == "lose" and part not in closed:
            ledger.lose(part)
            closed.add(part)
        elif part in closed:
            with pytest.raises(LedgerError, match="is (lost|merged)"):
                ledger.check(part, (), 0.0) if what == "late" else ledger.assign(part)
        elif what == "assign":
            ledger.assign(part)
        elif what == "merge":
            merge(part)
        assert ledger.is_complete == (sorted(merged) == list(range(num)))
    for part in parts:
        if part not in closed:
            merge(part)
    while (number := ledger.assign(OWN)) is not None:
        merged.append(number)
    assert sorted(merged) == list(range(num)) and ledger.is_complete
    assert ledger.denominator == sum(range(num))


def test_divisor_of_many_tokens_may_differ_by_what_float32_rounds():
    shares = np.random.default_rng(0).integers(10_000, 60_000, 1_200).astype(float)
    ledger = GradientLedger()
    for share in shares:
        ledger.add(share)
    added = float(functools.reduce(lambda total, share: np.float32(total + np.float32(share)), shares, np.float32(0)))
    assert added != ledger.denominator and ledger.is_sum(added)
    assert not ledger.is_sum(added - float(shares.min()))


@pytest.mark.parametrize(("numbers", "denominator"), [((0,), 3.0), ((1, 0), 3.0), ((0, 1, 1), 5.0), ((0, 1), 3.01)])
def test_sum_of_other_micro_batches_is_refused(numbers, denominator):
    ledger = GradientLedger()
    for share in (1.0, 2.0):
        ledger.add(share)
    assert [ledger.assign("part") for _ in range(3)] == [0, 1, None]
    with pytest.raises(LedgerError, match=r"expected micro-batches \[0, 1\] with denominator 3.0"):
        ledger.check("part", numbers, denominator)
    ledger.check("part", (0, 1), 3.0)


def test_update_begins_anew_after_the_last_one():
    ledger = GradientLedger()
    ledger.add(1.0)
    ledger.assign("part")
    ledger.clear()
    assert ledger.is_complete and ledger.denominator == 0.0
    with pytest.raises(LedgerError, match="is lost"):
        ledger.check("part", (0,), 1.0)
    assert ledger.add(1.0) == 0
