"""Rows that are made by index, some of which are none."""

import json

import pytest

from learner.data import generated
from learner.data.open_sources import open_sources
from learner.data.prompt_stream import load_prompts
from learner.metrics.metric_names import meaning
from tests.learner.data.rooms import config_of, take

BAD = {5: "empty", 11: "raises", 12: "refused", 17: "long", 40: "empty"}
"""By index; from `broken_from` on all are empty."""


def rows(seed, args):
    """Row i, good or as `BAD` says."""
    del seed

    def row(index):
        kind = BAD.get(index, "empty" if index >= args["broken_from"] else "good")
        if kind == "raises":
            raise KeyError("no such game")
        question = {"empty": "", "long": "x" * 500}.get(kind, f"game {index}")
        return {"question": question, "role": "narrator" if kind == "refused" else "user"}

    return row


def config(*, broken_from=10**9, num_problems=4):
    return config_of(
        max_tokens=200,
        num_problems=num_problems,
        environment="toy",
        environment_rows=f"{__name__}:rows",
        environment_args={"broken_from": broken_from},
        held_out_one_in=4,
    )


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(generated, "MAX_BAD_IN_A_ROW", 20)


def test_bad_row_is_set_aside_with_its_index_and_reason_and_counted(chat_tokenizer):
    found = []
    stream, _, bad = load_prompts(config(), chat_tokenizer, quarantine=found.append)
    seen = take(stream, 60)
    assert len(seen) == len(set(seen)) == 60 and not {f"game {i}" for i in BAD} & set(seen)
    assert {row.row for row in found} == BAD.keys() and {row.path for row in found} == {"prompts.environment='toy'"}
    reasons = {row.row: row.reason for row in found}
    for row, wanted in {
        5: "is empty",
        11: "KeyError: 'no such game'",
        12: "no narrator",
        17: "tokens, expected 1",
    }.items():
        assert wanted in reasons[row]
    assert (metrics := stream.metrics()) == {"prompts/bad_rows": 4, "prompts/too_long_rows": 1}
    assert all(meaning(name) for name in metrics)
    # The evaluation is drawn from rows that may be bad as well.
    assert bad and {row.path for row in bad} == {"prompts.environment='toy' (evaluation)"}


@pytest.mark.parametrize("before", [0, 3, 4, 9, 25])
def test_stream_with_bad_rows_restored_goes_on_alike_and_counts_alike(chat_tokenizer, before):
    stream, _, _ = load_prompts(config(), chat_tokenizer)
    take(stream, before)
    state = json.loads(json.dumps(stream.get_state()))
    want, counts = take(stream, 40), stream.metrics()
    found = []
    resumed, _, _ = load_prompts(config(), chat_tokenizer, quarantine=found.append)
    resumed.set_state(state)
    num_before = sum(resumed.metrics().values())
    assert take(resumed, 40) == want and resumed.metrics() == counts
    assert resumed.get_state() == stream.get_state()
    assert num_before + len(found) == sum(counts.values()) == len(BAD)


def test_stream_of_nothing_but_bad_rows_ends_with_the_last_reason(chat_tokenizer, small):
    stream, _, _ = load_prompts(config(broken_from=60, num_problems=0), chat_tokenizer)
    with pytest.raises(
        ValueError, match=r"environment='toy': 20 consecutive rows were quarantined; .*row 79: .*is empty"
    ):
        take(stream, 100)


def test_open_source_whose_rows_are_all_bad_says_why(chat_tokenizer, small):
    with pytest.raises(ValueError, match=r"\(evaluation\): 20 consecutive rows were quarantined; .*row 37: .*is empty"):
        open_sources(config(broken_from=0), chat_tokenizer)
    with pytest.raises(ValueError, match=r"of its first 20 questions none can be trained on: .*row 0: .*is empty"):
        open_sources(config(broken_from=0, num_problems=0), chat_tokenizer)
