import dataclasses
import json

import pytest

from configs import overrides
from configs.sections import EvaluationSet, LoraConfig, LossConfig, PublishConfig
from launch.tools.evaluate.settings import (
    EvalRequest,
    default_base,
    model_number,
    prompt_set,
    resolve_config,
)


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    config = {"max_position_embeddings": 2048, "vocab_size": 500, "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def settled(model, *prompts, given=None, base=None, **asked):
    return resolve_config(base or default_base(model), EvalRequest(prompts=prompts, **asked), given or {}, model)


@pytest.mark.parametrize(
    ("text", "name", "fields"),
    [
        ("data/gsm8k.test.jsonl", "gsm8k", {"path": "data/gsm8k.test.jsonl"}),
        ("hard=data/a.parquet", "hard", {"path": "data/a.parquet"}),
        ("data/a=b.jsonl", "a-b", {"path": "data/a=b.jsonl"}),
        ("hf:openai/gsm8k", "gsm8k", {"path": "hf:openai/gsm8k"}),
        ("task:chain_sum", "chain_sum", {"task": "chain_sum"}),
        ("g=environment:guess", "g", {"environment": "guess"}),
        ("heldout", "heldout", {}),
    ],
)
def test_prompt_set_is_named_after_its_source_unless_it_has_a_name(text, name, fields):
    assert prompt_set(text) == (name, EvaluationSet(**fields))


def test_prompt_set_that_says_nothing_is_refused():
    for text in ("", "a="):
        with pytest.raises(ValueError, match="--prompts: expected a file"):
            prompt_set(text)


def test_settle_flags_say_how_each_set_is_asked(model):
    config = settled(model, "a.jsonl", "b.jsonl", k=4, top_p=0.9, max_tokens=100, limit=7, verifier="math")
    assert list(config.evaluation_sets) == ["a", "b"]  # and no held-out problems
    for one in config.evaluation_sets.values():
        asked = (one.k, one.temperature, one.top_p, one.max_tokens, one.num_problems, one.verifier)
        assert asked == (4, 1.0, 0.9, 100, 7, "math")
    assert config.model.served_dtype == "bfloat16" and config.model.path == str(model)


def test_settle_is_greedy_for_one_sample_and_samples_several(model):
    assert settled(model, "a.jsonl").evaluation_sets["a"].temperature == 0
    assert settled(model, "a.jsonl", k=2).evaluation_sets["a"].temperature == 1
    assert settled(model, "a.jsonl", temperature=0.6).evaluation_sets["a"].temperature == 0.6
    with pytest.raises(ValueError, match="expected k=1 for greedy sampling, got k=2"):
        settled(model, "a.jsonl", k=2, temperature=0.0)


def test_settle_overrides_say_more_of_a_set(model):
    given = {
        "evaluation.sets.a.answer_field": "solution",
        "evaluation.sets.a.k": "2",
        "evaluation.sets.a.temperature": "1",
    }
    one = settled(model, "a.jsonl", given=given).evaluation_sets["a"]
    assert (one.answer_field, one.k) == ("solution", 2)
    with pytest.raises(ValueError, match="did you mean"):
        settled(model, "a.jsonl", given={"evaluation.sets.a.answr": "x"})


def test_settle_of_a_preset_asks_its_own_sets_as_they_say(model):
    base = overrides.apply(
        overrides.load_preset("tiny"),
        {
            "evaluation.sets.hard.task": "chain_sum",
            "evaluation.sets.hard.k": "4",
            "evaluation.sets.hard.max_tokens": "9",
        },
    )
    config = settled(model, base=base)
    assert list(config.evaluation_sets) == ["heldout", "hard"]
    hard, held_out = config.evaluation_sets["hard"], config.evaluation_sets["heldout"]
    assert (hard.k, hard.temperature, hard.max_tokens) == (4, 1.0, 9) and held_out.num_problems == 256
    assert settled(model, base=base, limit=3).evaluation_sets["heldout"].num_problems == 3
    assert list(settled(model, "heldout", base=base).evaluation_sets) == ["heldout"]


def test_generated_sets_alone_have_the_default_number_of_problems(model):
    config = settled(model, "task:chain_sum", "environment:guess")
    assert {n: s.num_problems for n, s in config.evaluation_sets.items()} == {"chain_sum": 256, "guess": 256}
    assert (
        settled(model, "task:chain_sum", given={"evaluation.num_problems": "64"})
        .evaluation.sets["chain_sum"]
        .num_problems
        == 64
    )


def test_limit_makes_no_set_larger(model):
    base = preset(
        num_problems=16, sets__few__task="chain_sum", sets__few__num_problems=5, sets__other__task="leg_counting"
    )
    sets = settled(model, base=base, limit=8).evaluation_sets
    assert {n: s.num_problems for n, s in sets.items()} == {"heldout": 8, "few": 5, "other": 8}
    sets = settled(model, base=base, limit=99).evaluation_sets
    assert {n: s.num_problems for n, s in sets.items()} == {"heldout": 16, "few": 5, "other": 16}


def preset(**fields):
    given = {f"evaluation.{name.replace('__', '.')}": str(value) for name, value in fields.items()}
    return overrides.apply(overrides.load_preset("tiny"), given)


def test_settle_temperature_that_a_set_or_a_preset_says_is_kept_whatever_k(model):
    base = preset(temperature=0.6, sets__low__task="chain_sum", sets__low__temperature=0.3, sets__low__k=2)

    def temperatures(*prompts, base=base, **asked):
        return {
            n: (s.k, s.temperature) for n, s in settled(model, *prompts, base=base, **asked).evaluation_sets.items()
        }

    assert temperatures() == {"heldout": (1, 0.6), "low": (2, 0.3)}
    assert temperatures(k=8) == {"heldout": (8, 0.6), "low": (8, 0.3)}
    assert temperatures(k=1) == {"heldout": (1, 0.6), "low": (1, 0.3)}
    assert temperatures("a=task:chain_sum", "heldout", k=4) == {"heldout": (4, 0.6), "a": (4, 0.6)}
    assert temperatures(k=8, temperature=0.9) == {"heldout": (8, 0.9), "low": (8, 0.9)}
    told = {"evaluation.temperature": "0.7", "evaluation.sets.low.k": "3"}
    assert temperatures(k=8, given=told) == {"heldout": (8, 0.7), "low": (3, 0.3)}
    unsaid = preset(sets__low__task="chain_sum", sets__low__temperature=0.3)
    assert temperatures(base=unsaid, k=8) == {"heldout": (8, 1.0), "low": (8, 0.3)}
    assert temperatures(base=unsaid, k=1) == {"heldout": (1, 0.0), "low": (1, 0.3)}
    assert temperatures(base=preset(sets__heldout__temperature=0.2), k=2)["heldout"] == (2, 0.2)
    assert temperatures("heldout", base=preset(sets__heldout__temperature=0.2), k=2) == {"heldout": (2, 0.2)}


def test_settle_of_a_greedy_preset_takes_several_samples_with_a_temperature_alone(model):
    base = preset(temperature=0)
    with pytest.raises(ValueError, match="expected k=1 for greedy sampling, got k=8. .* or a temperature"):
        settled(model, base=base, k=8)
    assert settled(model, base=base, k=8, temperature=0.5).evaluation_sets["heldout"].temperature == 0.5
    given = {"evaluation.temperature": "0.4"}
    assert settled(model, base=base, k=8, given=given).evaluation_sets["heldout"].temperature == 0.4


def test_settle_of_a_run_with_adapters_serves_the_folder_without_any(model):
    base = dataclasses.replace(
        overrides.load_preset("tiny"),
        lora=LoraConfig(rank=16, alpha=8.0, targets="q,v"),
        publish=PublishConfig(lora="adapter"),
    )
    config = settled(model, base=base)
    assert base.publishes_adapters and not config.publishes_adapters
    assert config.lora == LoraConfig() and config.publish.lora == "merged"
    with pytest.raises(ValueError, match="lora.rank=4 has no effect"):
        settled(model, base=base, given={"lora.rank": "4"})


def test_settle_of_a_supervised_run_asks_its_prompts_as_any_other(model):
    base = overrides.load_preset("sft")
    assert base.loss.is_supervised and base.sft.rows_per_update > 0
    config = settled(model, base=base)
    assert not config.loss.is_supervised and config.evaluation.num_problems == base.evaluation.num_problems


@pytest.mark.parametrize(
    ("preset", "fields", "max_tokens"),
    [
        ("sft", {"model.max_tokens": "88"}, 88),
        ("sft", {"model.max_tokens": "1500", "packing.row_tokens": "1500"}, 1024),
        ("sft", {"model.max_tokens": "88", "sampling.max_response_tokens": "20"}, 20),
        ("sft:tiny", {}, 6),
    ],
)
def test_settle_of_a_supervised_run_lets_a_response_be_as_long_as_its_rows(model, preset, fields, max_tokens):
    config = settled(model, base=overrides.apply(overrides.load_preset(preset), fields))
    assert config.evaluation_sets["heldout"].max_tokens == max_tokens


@pytest.mark.parametrize(
    "fields",
    [
        {"loss.advantage": "gae", "critic.gae_lambda": "0.95", "rounds.samples_per_group": "1"},
        {
            "loss.teacher_coef": "1",
            "loss.teachers.a.path": "m",
            "prompts.teacher_field": "teacher",
            "prompts.mixture.one.path": "a.jsonl",
            "prompts.mixture.one.verifier": "exact",
            "prompts.mixture.one.teacher": "a",
        },
        {"model.routing_replay": "True", "actor.prefix_caching": "True"},
        {"prompts.num_epochs": "1"},
        {"loss.correction.veto": "group", "packing.whole_groups": "True", "packing.rows": "16"},
    ],
)
def test_settle_of_a_run_takes_nothing_that_only_training_reads(model, fields):
    base = overrides.apply(overrides.load_preset("rolloutpipe:tiny"), fields)
    config = settled(model, base=base)
    assert config.loss == LossConfig() and not config.model.routing_replay and not config.prompts.num_epochs
    assert config.prompts.mixture.keys() == base.prompts.mixture.keys()


def test_settle_response_that_leaves_no_room_is_refused(model):
    assert settled(model, "a.jsonl", max_tokens=2000).model.max_tokens == 2048
    with pytest.raises(ValueError, match="leave no space for a prompt"):
        settled(model, "a.jsonl", max_tokens=2048)


def test_settle_two_sets_of_one_name_are_refused(model):
    with pytest.raises(ValueError, match="two --prompts are named 'a'"):
        settled(model, "x/a.jsonl", "y/a.jsonl")


def test_folder_that_is_none_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match="is not a Hugging Face folder: cannot read config.json"):
        model_number(tmp_path, "max_position_embeddings")
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="not a JSON object"):
        model_number(tmp_path, "vocab_size")
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 7, "max_position_embeddings": 9}}))
    assert [model_number(tmp_path, name) for name in ("vocab_size", "max_position_embeddings")] == [7, 9]
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="has no vocab_size"):
        model_number(tmp_path, "vocab_size")
