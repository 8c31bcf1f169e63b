"""`math` against the golden pairs: what we want of each is stated by whoever made the pair, no verifier."""

import pytest

from tests.actor.rewards.verifiers import math_agreement

PAIRS = math_agreement.golden()


def test_golden_pairs_are_many_and_each_is_there_once():
    ids, pairs = {one["id"] for one in PAIRS}, {(one["gold"], one["response"]) for one in PAIRS}
    assert len(ids) == len(pairs) == len(PAIRS) >= 200


@pytest.mark.heavy
def test_math_gives_each_golden_pair_the_verdict_that_is_wanted():
    verdicts = math_agreement.judge(PAIRS, timeout_s=60.0).of_pairs
    differing = {one["id"] for one in PAIRS if verdicts[one["id"]] != float(one["is_right"])}
    assert differing == {one["id"] for one in PAIRS if "limitation" in one}


@pytest.mark.heavy
def test_page_lists_each_pair_on_which_the_library_says_otherwise():
    # Those on which it hangs are left out: they take minutes, which the page's own script takes.
    pairs = [one for one in PAIRS if one["kind"] != math_agreement.MAY_HANG]
    library = math_agreement.judge(
        pairs, verifier="library_patient", command=math_agreement.LIBRARY_COMMAND, timeout_s=60.0
    )
    page = math_agreement.PAGE.read_text()
    listed = {one["id"] for one in pairs if f"\n| {one['id']} | " in page}
    assert listed == {one["id"] for one in pairs if not library.agrees(one) or "limitation" in one}
