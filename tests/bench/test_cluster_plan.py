"""Many sizes, their table and figure, and variants."""

import pytest

from launch.tools.plan.control_plane.capacity import bottleneck
from launch.tools.plan.profile import LearnerProfile
from tests.bench.cluster_plan import scale, variant_of
from tests.launch.tools.plan.control_plane.setup import cluster_of, served, store
from tests.launch.tools.plan.setup import by_window, profile_of


def test_generation_gives_out_above_the_balance_and_the_learner_below_it():
    # An engine samples 640 tokens/s, a chip trains 160: four chips an engine balance.
    profile = profile_of(learner=LearnerProfile(seconds_per_token=100 / 101 / 160))
    config = by_window(U=2, K=2)
    cells = scale(config, profile, engines=(1, 4), learner_chips=(1, 2, 8, 64))
    names = [[c.limit.part.name for c in row] for row in cells]
    assert names == [["learner compute"] * 2] * 2 + [["generation", "learner compute"], ["generation"] * 2]
    assert cells[0][0].tokens_per_s == pytest.approx(160, rel=0.01)
    assert cells[3][1].tokens_per_s == pytest.approx(4 * 640, rel=0.01)


def test_variant_changes_config_and_profile():
    profile = profile_of(store=store(max_connections=60))
    text = "deltas, many: publish.full_every=7, profile.store.max_connections=500"
    title, config, changed = variant_of(text, served(), profile)
    assert title == "deltas, many"
    assert config.publish.full_every == 7 and changed.store == store(max_connections=500)
    assert bottleneck(cluster_of(config, store=changed.store)).part.name != "store's connections"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("publish.full_every=7", "--variant wants"),
        ("a: publish.full_every", "has no value"),
        ("a: publish.full=7", "publish has when"),
        ("a: profile.store.max_connections=7", "the profile has no store.max_connections"),
        ("a: profile.num_engines=many", "num_engines"),
    ],
)
def test_variant_that_does_not_fit_is_refused(text, says):
    with pytest.raises(ValueError, match=says):
        variant_of(text, served(), profile_of())
