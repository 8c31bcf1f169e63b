"""Many sizes, their table and figure, and variants."""

import dataclasses

import pytest

from launch.tools.plan.control_plane.capacity import bottleneck
from launch.tools.plan.profile import LearnerProfile
from tests.bench.cluster_plan import COLOURS, counts_up_to, name_in_figure, plot_scale, scale, variant_of
from tests.launch.tools.plan.control_plane.setup import cluster_of, network, served, store
from tests.launch.tools.plan.setup import by_window, profile_of


def test_counts_go_up_in_even_steps_of_the_logarithm():
    assert counts_up_to(8, per_octave=1) == [1, 2, 4, 8]
    assert counts_up_to(6, per_octave=1) == [1, 2, 4, 6]
    assert counts_up_to(1) == [1]
    many = counts_up_to(4096)
    assert many[0] == 1 and many[-1] == 4096 and {2**i for i in range(13)} <= set(many)


def test_generation_gives_out_above_the_balance_and_the_learner_below_it():
    # An engine samples 640 tokens/s, a chip trains 160: four chips an engine balance.
    profile = profile_of(learner=LearnerProfile(seconds_per_token=100 / 101 / 160))
    config = by_window(U=2, K=2)
    cells = scale(config, profile, engines=(1, 4), learner_chips=(1, 2, 8, 64))
    names = [[c.limit.part.name for c in row] for row in cells]
    assert names == [["learner compute"] * 2] * 2 + [["generation", "learner compute"], ["generation"] * 2]
    assert cells[0][0].tokens_per_s == pytest.approx(160, rel=0.01)
    assert cells[3][1].tokens_per_s == pytest.approx(4 * 640, rel=0.01)


def test_every_part_that_can_give_out_has_a_colour():
    rates = dict(learner_bytes_per_s=1, actor_bytes_per_s=1, write_bytes_per_s=1, bucket_bytes_per_s=1)
    shop = store(link_bytes_per_s=1, max_connections=1, byte_s=1, claim_call_s=1, write_s=1, read_s=1, listener_s=1)
    for part in cluster_of(served(bucket="s3://b"), store=shop, network=network(**rates)).parts(1.0):
        kinds = [(what, 1.0) for what, _ in part.made_of] or [("", 0.0)]
        for kind in kinds:
            assert name_in_figure(dataclasses.replace(part, made_of=(kind,) if kind[0] else ())) in COLOURS


def test_figure_of_several_panels_is_written(tmp_path):
    pytest.importorskip("matplotlib")
    config = served()
    profile = profile_of(store=store(max_connections=60), network=network(actor_bytes_per_s=200))
    cells = scale(config, profile, engines=(1, 8, 64), learner_chips=(1, 8, 64))
    plot_scale({"one": cells, "two": cells, "three": cells}, tmp_path / "scale.png")
    assert (tmp_path / "scale.png").read_bytes().startswith(b"\x89PNG")


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
