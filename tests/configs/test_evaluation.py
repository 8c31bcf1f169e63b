import json

import pytest

from configs import overrides
from configs.sections import EvaluationConfig, EvaluationSet
from launch.tools.deploy import deployment

PRESET = "tiny"


def config(**given):
    return overrides.apply(overrides.load_preset(PRESET), {f"evaluation.{k}": v for k, v in given.items()})


def test_default_is_the_held_out_set_as_before():
    assert list(config().evaluation_sets) == ["heldout"]
    one = config().evaluation_sets["heldout"]
    assert (one.k, one.temperature, one.top_p, one.num_problems, one.every_n_steps) == (1, 1.0, 1.0, 256, 40)
    assert one.max_tokens == config().sampling.max_response_tokens and not one.has_source
    assert EvaluationConfig(num_problems=0).resolved == {}


def test_set_says_what_differs_and_the_rest_is_the_sections_or_the_prompts():
    given = {
        "sets.a.path": "a.jsonl",
        "sets.a.verifier": "math",
        "sets.a.k": "4",
        "sets.heldout.k": "2",
        "temperature": "0.5",
        "k": "3",
    }
    sets = config(**given).evaluation_sets
    assert list(sets) == ["heldout", "a"]
    assert (sets["heldout"].k, sets["a"].k, sets["a"].temperature, sets["a"].num_problems) == (2, 4, 0.5, 0)
    assert (sets["a"].verifier, sets["a"].prompt_field) == ("math", config().prompts.prompt_field)
    task = config(**{"sets.b.task": "chain_sum"}).evaluation_sets["b"]
    assert (task.verifier, task.num_problems) == (config().prompts.verifier, 256)


def test_sets_come_back_from_json():
    before = config(**{"sets.a.path": "a.jsonl", "sets.a.top_p": "0.9", "sets.a.rewards": '{"math": 1}'})
    assert overrides.from_dict(json.loads(overrides.to_json(before))) == before


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"sets.a.k": "-1"}, r"evaluation.sets.a.k must be >= 0"),
        ({"sets.a.path": "x", "sets.a.weight": "2"}, r"evaluation.sets.a.weight=2.0 has no effect"),
        (
            {"sets.a.path": "x", "sets.a.verifier": "math", "sets.a.rewards": '{"format": 0.2}'},
            r"evaluation.sets.a.verifier=math has no effect with evaluation.sets.a.rewards",
        ),
        (
            {"sets.a.path": "x", "sets.a.verifier": "math", "sets.a.pattern": "Q: (.*)"},
            r"sets.a.pattern require evaluation.sets.a.task",
        ),
        ({"sets.a.path": "x", "sets.a.eval_path": "y"}, r"evaluation.sets.a.eval_path=y has no effect"),
        ({"sets.heldout.task": "chain_sum"}, r"evaluation.sets.heldout must use the held-out problems"),
        ({"sets.a.verifier": "math"}, r"evaluation.sets.a.verifier=math has no effect without"),
        ({"sets.a.temperature": "0", "sets.a.k": "4"}, r"expected k=1 for greedy sampling, got k=4"),
        ({"sets.a.temperature": "3"}, r"evaluation.sets.a.temperature must be in"),
        ({"sets.a.top_p": "0"}, r"evaluation.sets.a.top_p must be in"),
        ({"sets.rewards.k": "2"}, r"expected a name of letters"),
        ({"sets.a b.k": "2"}, r"expected a name of letters"),
        ({"sets.a.path": "x", "sets.a.verifier": "nope"}, r"evaluation.sets.a.verifier"),
        (
            {"sets.a.path": "x", "sets.a.task": "chain_sum"},
            r"evaluation.sets.a.path and evaluation.sets.a.task are two",
        ),
        ({"sets.a.max_tokens": "4000"}, r"evaluation.sets.a.max_tokens \(4000\) must leave room"),
        ({"sets.a.path": "x", "sets.a.verifier": "judge"}, r"verifier=judge requires judge.url"),
        ({"max_engine_fraction": "0"}, r"evaluation.max_engine_fraction must be in"),
        ({"k": "0"}, r"evaluation.k must be > 0"),
        ({"top_p": "2"}, r"evaluation.top_p must be in"),
        ({"at_publish": "never"}, r"one of go_on, wait"),
        ({"sets.a.tempature": "1"}, r"no field 'evaluation.sets.a.tempature'; did you mean"),
    ],
)
def test_what_can_not_be_is_refused_by_its_field(given, says):
    with pytest.raises(ValueError, match=says):
        config(**given)


def test_no_held_out_problems_leave_nothing_to_a_set_of_them_nor_a_number_to_one_made_by_index():
    with pytest.raises(
        ValueError, match=r"evaluation.sets.a uses held-out problems, which require evaluation.num_problems > 0"
    ):
        EvaluationConfig(num_problems=0, sets={"a": EvaluationSet(k=2)})
    with pytest.raises(ValueError, match=r"evaluation.sets.a.num_problems must be > 0"):
        EvaluationConfig(num_problems=0, sets={"a": EvaluationSet(task="chain_sum")})
    assert list(EvaluationConfig(num_problems=0, sets={"a": EvaluationSet(path="a.jsonl")}).resolved) == ["a"]


def test_what_sets_need_of_actors_counts_as_what_prompts_need():
    sets = {
        "sets.a.path": "/data/a.jsonl",
        "sets.a.verifier": "code",
        "sets.b.environment": "guess",
        "sets.c.path": "/data/c.jsonl",
        "sets.c.verifier": "my_module:score",
    }
    made = config(**sets)
    assert {"code", "my_module:score"} <= made.parts.keys() and made.environments_played == ("guess",)
    assert made.custom_verifiers == ("my_module:score",) and made.custom_environments == ()
    paths = deployment._prompt_paths(made)
    assert {paths[f"evaluation.sets.{name}.path"] for name in "ac"} == {"/data/a.jsonl", "/data/c.jsonl"}
