"""Every number of the configuration has a range, and every path one way of being read."""

import math
import pathlib
import typing

import pytest

from configs.overrides import apply, load_preset
from configs.schema import Config
from configs.sections import OptimizerConfig, PromptsConfig, RunConfig, StoreConfig
from configs.sections.base import Range, absolute
from configs.sections.evaluation import EvaluationSet
from configs.sections.prompts import PromptSource

TINY = load_preset("tiny")


def _numbers(section: type, where: str = "") -> dict[str, Range | None]:
    """By path of a number's field: its range, read from the annotations alone."""
    found: dict[str, Range | None] = {}
    plain, noted = typing.get_type_hints(section), typing.get_type_hints(section, include_extras=True)
    for name, kind in plain.items():
        members = typing.get_args(kind) or (kind,)
        if kind in SECTIONS:
            found |= _numbers(kind, f"{where}{name}.")
        elif bool not in members and {int, float} & set(members) and typing.get_origin(kind) is not dict:
            found[where + name] = _range(noted[name])
    return found


def _range(hint: object) -> Range | None:
    notes = [note for note in getattr(hint, "__metadata__", ()) if isinstance(note, Range)]
    return (notes or [_range(part) for part in typing.get_args(hint)] or [None])[0]


SECTIONS = {kind for kind in typing.get_type_hints(Config).values() if hasattr(kind, "__dataclass_fields__")}
NUMBERS = _numbers(Config)


def test_every_number_has_a_range():
    every = NUMBERS | _numbers(PromptSource) | _numbers(EvaluationSet)
    assert [path for path, found in every.items() if found is None] == []
    assert len(NUMBERS) > 100


@pytest.mark.heavy
@pytest.mark.parametrize("path", sorted(NUMBERS))
def test_number_outside_its_range_is_refused_by_name(path):
    found = NUMBERS[path]
    assert found is not None
    for value in ("nan", "inf", "-inf", "1e300", f"{int(found.low - max(1, abs(found.low)))}"):
        with pytest.raises(ValueError, match=path.replace(".", r"\.")):
            apply(TINY, {path: value})


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, 1e308])
def test_weight_of_a_source_that_no_share_can_be_counted_by_is_refused(value):
    with pytest.raises(ValueError, match=r"prompts\.mixture\.b\.weight"):
        PromptsConfig(mixture={"a": PromptSource(task="x"), "b": PromptSource(task="y", weight=value)})


@pytest.mark.parametrize("fields", [{"learning_rate": 1e30}, {"beta1": 1.0}, {"weight_decay": 1e9}])
def test_number_known_to_be_absurd_is_refused(fields):
    with pytest.raises(ValueError, match="optimizer"):
        OptimizerConfig(**fields)


def test_home_is_filled_in_wherever_a_local_path_stands(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    assert RunConfig(dir="~/runs/x").dir == "/home/ada/runs/x"
    assert StoreConfig(url="sqlite:///~/s.sqlite", bucket="file://~/b").bucket == "file:///home/ada/b"
    assert StoreConfig(url="sqlite:///~/s.sqlite").url == "sqlite:////home/ada/s.sqlite"
    assert PromptSource(path="hf:~/sets/gsm8k", eval_path="~").eval_path == "/home/ada"
    assert EvaluationSet(path="hf:~/sets/gsm8k").path == "hf:/home/ada/sets/gsm8k"
    assert RunConfig(dir="a/~/b").dir == "a/~/b"


def test_home_of_nobody_is_refused():
    with pytest.raises(ValueError, match="~nosuchuser/x"):
        RunConfig(dir="~nosuchuser/x")


def test_relative_paths_are_made_absolute_and_names_stay(tmp_path: pathlib.Path):
    (tmp_path / "set").mkdir()
    config = apply(
        TINY,
        {
            "prompts.mixture": '{"a": {"path": "a.jsonl"}, "b": {"path": "hf:openai/gsm8k"}}',
            "prompts.verifier": "exact",
            "prompts.task": "",
            "prompts.task_args": "{}",
            "prompts.pattern": "",
            "evaluation.sets": '{"s": {"path": "hf:set", "verifier": "exact"}}',
            "publish.bucket": "s3://weights/run",
        },
    )
    found = absolute(config, tmp_path)
    assert found.prompts.mixture["a"].path == f"{tmp_path}/a.jsonl"
    assert found.prompts.mixture["b"].path == "hf:openai/gsm8k"
    assert found.evaluation.sets["s"].path == f"hf:{tmp_path}/set"
    assert (found.publish.bucket, found.model.path) == ("s3://weights/run", config.model.path)
    assert absolute(found, tmp_path / "elsewhere") == found
    for spelled in ("./m", "m/", "x/../m"):
        assert absolute(apply(TINY, {"model.path": spelled}), tmp_path).model.path == f"{tmp_path}/m"


@pytest.mark.parametrize("field", ["judge.api_key_file", "environments.python", "actor.base_path"])
def test_relative_paths_of_actors_are_made_absolute_and_homes_stay(field, tmp_path):
    def found(path, folder=tmp_path):
        section, _, name = field.partition(".")
        return getattr(getattr(absolute(apply(TINY, {field: path}), folder), section), name)

    assert found("") == "" and found("./a/../b/c") == f"{tmp_path}/b/c" == found(f"{tmp_path}/b/c", tmp_path / "x")
    assert found("~/b") == "~/b" and found("~ann/b") == "~ann/b"  # of the actor's user
    assert found("b") == ("b" if field == "environments.python" else f"{tmp_path}/b")  # a command of PATH


def test_file_of_a_judge_template_is_made_absolute_and_a_text_stays(tmp_path):
    def found(template):
        return absolute(apply(TINY, {"judge.template": template}), tmp_path).judge.template

    assert found("@./a/../b") == f"@{tmp_path}/b" and found("@/c") == "@/c" and found("@~/b") == "@~/b"
    assert found("./a {response}") == "./a {response}"


@pytest.mark.parametrize(
    ("epochs", "warmup_steps", "is_refused"), [(1, 9, True), (1, 8, False), (2, 16, False), (2, 17, True)]
)
def test_warm_up_that_outlasts_the_run_is_refused(epochs, warmup_steps, is_refused):
    fields = {"run.num_updates": "8", "rounds.epochs": str(epochs), "optimizer.warmup_steps": str(warmup_steps)}
    if not is_refused:
        assert apply(TINY, fields).optimizer.warmup_steps == warmup_steps
        return
    with pytest.raises(ValueError, match=r"optimizer\.warmup_steps \(\d+\) must be at most the run's"):
        apply(TINY, fields)


def test_run_name_that_no_folder_can_have_is_refused():
    with pytest.raises(ValueError, match=r"run\.name must have at most 200 characters"):
        RunConfig(name="a" * 201)
