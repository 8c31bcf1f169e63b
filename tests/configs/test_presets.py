"""Presets at paper size against the papers' numbers, written down here a second time, from the papers."""

import dataclasses
import pathlib

import pytest

from configs import overrides
from configs.race_capacity import check_race_capacity
from configs.schema import Config
from configs.sections import RoundsConfig

FOLDER = pathlib.Path(overrides.__file__).parent


def preset(name: str) -> Config:
    return overrides.load_preset(name)


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        # RolloutPipe, section 5.1: four rounds of R = 96, B = 16.
        ("serial", dict(samples=16, num_updates=4 * 48, learning_rate=1e-6)),
        ("cgp", dict(samples=16, num_updates=4 * 48, learning_rate=1e-6)),
        ("rolloutpipe", dict(samples=16, num_updates=4 * 48, learning_rate=1e-6)),
        # RollPacker, sections 2.2 and 6: 128 prompts of 8, 16k tokens of response.
        ("rollpacker", dict(samples=1024, response=16384)),
        # PipelineRL, TMLR version, section 5: 1024 steps of 1024 sequences, 32k, 1e-6, H = 64, penalty from 30k on.
        (
            "pipelinerl",
            dict(samples=1024, num_updates=1024, context=32768, learning_rate=1e-6, places=64, overlong=2048),
        ),
        # PipelineRL, NeurIPS version, section 5: 1000 steps, 8K.
        (
            "pipelinerl_ess",
            dict(samples=1024, num_updates=1000, context=8192, learning_rate=1e-6, places=64, overlong=0),
        ),
    ],
)
def test_preset_at_paper_size_has_the_papers_numbers(name, numbers):
    config = preset(name)
    got = {
        "samples": config.rounds.groups_per_update * config.rounds.samples_per_group,
        "num_updates": config.run.num_updates,
        "context": config.model.max_tokens,
        "response": config.sampling.max_response_tokens,
        "learning_rate": config.optimizer.learning_rate,
        "places": config.actor.max_num_seqs,
        "overlong": config.loss.overlong_tokens,
    }
    assert {key: got[key] for key in numbers} == numbers


def test_preset_at_paper_size_has_its_papers_mechanism():
    in_flight, flash, packer = (preset(name) for name in ("pipelinerl", "roll_flash", "rollpacker"))
    # PipelineRL, TMLR version: 48 GPUs of H = 64 and B = 1024 (section 5), rings of the newest (4), a sum over tokens
    # divided by sequences (eq. 5).
    assert (in_flight.sequences, in_flight.admission.when_full) == (48 * 64, "drop_oldest")
    assert (in_flight.loss.normalization, in_flight.loss.max_weight) == ("sequence_sum", 5.0)
    # ROLL Flash: alpha = 2 (section 5.1), samples one by one (4.3), decoupled PPO (2.2).
    assert (flash.alpha, flash.max_lag_steps, flash.admission.unit) == (2.0, 2, "sample")
    assert (flash.loss.name, flash.loss.proximal) == ("decoupled_ppo", "batch")
    # RollPacker, section 6.3: eta = 1.25 for both.
    assert (packer.rounds.overprovision_prompts, packer.rounds.overprovision_samples) == (1.25, 1.25)


def test_no_two_papers_share_their_numbers_by_accident():
    sizes = {
        (c.run.num_updates, c.model.max_tokens, c.optimizer)
        for c in map(preset, ("rolloutpipe", "rollpacker", "pipelinerl", "pipelinerl_ess", "roll_flash"))
    }
    assert len(sizes) == 5


def test_no_paper_but_an_example_has_a_warm_up():
    warm_ups = {name: preset(name).optimizer.warmup_steps for name in ("serial", "rollpacker", "pipelinerl")}
    assert set(warm_ups.values()) == {0}


@pytest.mark.parametrize("size", ["tiny", "paper"])
def test_pipelinerl_ess_is_pipelinerl_with_the_stop(size):
    stop, base = preset(f"pipelinerl_ess:{size}"), preset(f"pipelinerl:{size}")
    assert stop.rounds.ess_floor > 0 == base.rounds.ess_floor
    assert dataclasses.replace(stop.rounds, ess_floor=0.0) == base.rounds
    assert (stop.publish, stop.optimizer, stop.admission.policy) == (base.publish, base.optimizer, "window")


@pytest.mark.parametrize("name", ["serial", "cgp", "rolloutpipe", "rollpacker", "pipelinerl", "roll_flash"])
def test_truncated_response_earns_nothing_but_where_a_paper_says_otherwise(name):
    # PipelineRL, TMLR version, section 5: completed sequences only. NeurIPS version: also one that did not end.
    assert preset(name).prompts.truncated_responses == "zero"
    assert preset("pipelinerl_ess").prompts.truncated_responses == "keep"


def test_race_for_fewer_places_than_requests_is_told():
    config = preset("rollpacker")
    said = check_race_capacity(config, num_engines=1, max_num_seqs=config.actor.max_num_seqs)
    # 160 prompts of 10 responses for 256 places.
    assert said and "1600 requests" in said and "256 slots" in said and "requires 7 engines" in said
    assert "with 6 engines" in (check_race_capacity(config, num_engines=6, max_num_seqs=256) or "")
    assert check_race_capacity(config, num_engines=7, max_num_seqs=256) is None
    assert check_race_capacity(preset("rollpacker:tiny"), num_engines=1, max_num_seqs=256) is None  # 20 x 10


@pytest.mark.parametrize("eta", [dict(overprovision_prompts=1.5), dict(overprovision_samples=1.5)])
def test_race_of_prompts_or_of_samples_alone_is_one(eta):
    rounds = RoundsConfig(groups_per_round=8, groups_per_update=8, samples_per_group=4, **eta)
    config = Config(preset="test", rounds=rounds)
    assert "48 requests" in (check_race_capacity(config, num_engines=1, max_num_seqs=47) or "")
    assert check_race_capacity(config, num_engines=1, max_num_seqs=48) is None


@pytest.mark.parametrize("name", ["serial", "rolloutpipe", "pipelinerl"])
def test_preset_without_a_race_is_told_nothing(name):
    assert check_race_capacity(preset(name), num_engines=1, max_num_seqs=1) is None
