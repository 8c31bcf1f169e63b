"""Combinations of the critic with other sections."""

import pytest

from configs import sections
from configs.schema import Config

WITH_CRITIC = sections.LossConfig(advantage="gae")
PAIRS = sections.RoundsConfig(samples_per_group=2)


def config_with(*, loss=WITH_CRITIC, rounds=PAIRS, **fields):
    return Config(preset="test", loss=loss, rounds=rounds, run=sections.RunConfig(num_updates=4), **fields)


def test_one_response_per_prompt_requires_a_critic():
    alone = sections.RoundsConfig(samples_per_group=1)
    assert config_with(rounds=alone).rounds.samples_per_group == 1
    with pytest.raises(ValueError, match=r"\(K\) must be >= 2 .* loss.advantage=gae"):
        config_with(loss=sections.LossConfig(), rounds=alone)
    distilled = sections.LossConfig(advantage="none", teacher_coef=1.0, teacher_path="m")
    assert config_with(loss=distilled, rounds=alone).rounds.samples_per_group == 1


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            dict(loss=sections.LossConfig(), critic=sections.CriticConfig(gae_lambda=0.9)),
            "critic.gae_lambda=0.9 has no effect without loss.advantage=gae",
        ),
        (
            dict(rounds=sections.RoundsConfig(filter_zero_variance=True)),
            "rounds.filter_zero_variance has no effect with loss.advantage=gae",
        ),
        (
            dict(
                loss=sections.LossConfig(advantage="gae", length_penalty=0.1),
                rounds=sections.RoundsConfig(samples_per_group=1),
            ),
            "loss.length_penalty=0.1 has no effect with rounds.samples_per_group=1",
        ),
        (
            dict(
                loss=sections.LossConfig(
                    name="reinforce", advantage="gae", correction=sections.CorrectionConfig(reject="token")
                )
            ),
            "loss.correction.reject and veto require an advantage of the group",
        ),
        (
            dict(critic=sections.CriticConfig(backbone="policy", path="models/small")),
            "critic.path=models/small has no effect with critic.backbone=policy",
        ),
        (
            dict(critic=sections.CriticConfig(value_clip=0.2)),
            "critic.value_clip=0.2 has no effect with rounds.epochs=1",
        ),
        (
            dict(
                rounds=sections.RoundsConfig(groups_per_round=8, groups_per_update=8),
                helpers=sections.HelpersConfig(num_engines=1),
            ),
            "helpers.num_engines requires another loss.advantage than gae",
        ),
    ],
)
def test_sections_that_do_not_fit_a_critic_are_refused(fields, said):
    with pytest.raises(ValueError, match=said):
        config_with(**fields)


def test_value_clip_with_two_epochs_is_accepted():
    rounds = sections.RoundsConfig(epochs=2)
    assert config_with(rounds=rounds, critic=sections.CriticConfig(value_clip=0.2)).critic.value_clip == 0.2
