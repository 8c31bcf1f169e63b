"""Progress that a ticket's next actor may rely on."""

import dataclasses

import numpy as np
import pytest
from msgspec import UNSET

from bridge.progress_types import ClaimedTicket, progress_of, without_progress
from bridge.rollout_types import Version
from tests.bridge.factories import make_progress, make_ticket


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"steps": np.array([1, 2], np.int32)}, "share one length"),
        ({"steps": np.array([-1], np.int32)}, "steps must be >= 0"),
        ({"behavior_logprobs": np.array([np.nan], np.float32)}, "finite"),
        ({"tokens": np.array([], np.int32)}, "must not be empty"),
        ({"index": -1}, "index must be in"),
        ({"reward": 1.0}, "only a finished response"),
        ({"finish": "abort"}, "finish must be one of"),
    ],
)
def test_request_that_no_engine_samples_is_refused(fields, why):
    with pytest.raises(ValueError, match=why):
        dataclasses.replace(make_progress().requests[0], **fields)


def test_versions_may_not_fall():
    request = make_progress().requests[0]
    two = {n: np.repeat(getattr(request, n), 2) for n in ("tokens", "behavior_logprobs", "incarnations")}
    with pytest.raises(ValueError, match="steps must be >= 0 and must not decrease"):
        dataclasses.replace(request, **two, steps=np.array([2, 1], np.int32))


def test_progress_names_its_actors_and_each_request_once():
    with pytest.raises(ValueError, match="expected actors"):
        make_progress(actors=())
    with pytest.raises(ValueError, match="indexes must rise"):
        make_progress("t", 1, 1)


@pytest.mark.parametrize(
    ("shapes", "fits"),
    [
        ([(2, 2, 2), None], True),  # two tokens of the prompt; not the response's last, here its only one
        ([None, None], True),
        ([(3, 2, 2), None], False),
        ([(2, 2, 2), (2, 2, 1)], False),
        ([(2, 2, 2), (2, 2, 2)], True),
    ],
)
def test_progress_whose_routing_is_not_of_its_tokens_fits_no_ticket(shapes, fits):
    made = make_progress("t", 0, 1)
    routing = [UNSET if shape is None else np.zeros(shape, np.uint8) for shape in shapes]
    requests = [dataclasses.replace(r, routed_experts=rows) for r, rows in zip(made.requests, routing, strict=True)]
    ticket = make_ticket("t", num_samples=4)
    assert ticket.prompt_tokens.size == 2 and {r.tokens.size for r in requests} == {1}
    assert dataclasses.replace(made, requests=tuple(requests)).fits(ticket) is fits


def test_ticket_is_claimed_with_and_begins_anew_without_its_progress():
    ticket = make_ticket(min_version=Version(incarnation=0, step=1))
    claimed = ClaimedTicket.of(ticket, make_progress(step=4))
    assert claimed.min_version == Version(incarnation=0, step=4)
    assert progress_of(claimed) is claimed.progress and progress_of(ticket) is None
    assert progress_of(without_progress(claimed)) is None and without_progress(ticket) is ticket
