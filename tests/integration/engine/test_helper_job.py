"""The main job by rounds with two engines, the second of which trains while the round's last responses run."""

from pathlib import Path

import pytest

from tests.integration.support import jobs

pytestmark = [pytest.mark.integration, pytest.mark.engine]
NUM_ROUNDS = 4
"""In the first the helper may still start; on a busy machine in the second too."""
NUM_GROUPS = 128
"""Of a round: enough that it lasts for seconds after the second engine has given its devices up."""


@pytest.fixture(scope="module")
def helped(tmp_path_factory: pytest.TempPathFactory, model: Path) -> jobs.Job:
    """A run that is done."""
    job = jobs.start(
        tmp_path_factory.mktemp("helped") / "run",
        model,
        config="cgp:tiny",
        run__num_updates=NUM_ROUNDS,
        rounds__groups_per_round=NUM_GROUPS,
        rounds__groups_per_update=NUM_GROUPS,
        admission__width="auto",
        packing__rows=1,
        actor__num_engines=2,
        actor__max_num_seqs=16,
        helpers__num_engines=1,
        helpers__release_at=0.25,
        sampling__max_response_tokens=40,
        model__max_tokens=64,
    )
    try:
        job.finish()
        return job
    finally:
        job.end()


def test_every_group_is_trained_once_by_learner_and_helper_together(helped: jobs.Job):
    jobs.check_every_group_trained_once(helped, num_updates=NUM_ROUNDS, per_update=NUM_GROUPS)
    rounds = helped.rows("round")
    assert len(rounds) == NUM_ROUNDS
    assert all(row["helper/lost"] == 0 for row in rounds)
    helped_in = [row for row in rounds if row["helper/batches"] > 0]
    assert helped_in and all(row["helper/released_at"] >= 0.25 for row in helped_in)
    assert all(0 < p["parity/max_abs_dlogprob"] < 1e-4 for p in helped.rows("probe"))


def test_engine_hands_its_responses_over_and_serves_again(helped: jobs.Job):
    down = helped.events("stand down")
    awake_us = down[0]["ts"] + down[0]["dur"]
    assert {event["pid"] for event in down} == {2}  # actor-1's file; the first engine serves all the time
    assert any(event["pid"] == 2 and event["ts"] > awake_us for event in helped.events("rollout"))
    assert any(event["args"]["tokens"] > 0 for event in helped.events("handed over"))
