"""A group's size against the wire format itself."""

import numpy as np
import pytest

from bridge import codec
from launch.tools.plan.control_plane.loads import group_bytes
from tests.bridge.factories import make_group, make_rollout, make_ticket


@pytest.mark.parametrize(("num_samples", "num_tokens", "prompt"), [(2, 2520, 2), (8, 20_000, 2), (16, 500, 900)])
def test_group_has_the_bytes_that_the_codec_makes_of_it(num_samples, num_tokens, prompt):
    ticket = make_ticket(num_samples=num_samples, prompt_tokens=np.arange(prompt, dtype=np.int32))
    group = make_group(ticket, rollouts=(make_rollout(num_tokens),) * num_samples)
    wanted = len(codec.encode(group, max_bytes=codec.MAX_BYTES))
    got = group_bytes(num_samples=num_samples, prompt_tokens=prompt, response_tokens=num_samples * num_tokens)
    assert got == pytest.approx(wanted, rel=0.01)
