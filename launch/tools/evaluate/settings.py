"""Evaluation settings: merges the command line into a config, whose `evaluation.sets` are evaluated."""

import dataclasses
import json
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from configs import overrides
from configs.schema import Config
from configs.sections import (
    CriticConfig,
    EvaluationConfig,
    EvaluationSet,
    LoraConfig,
    LossConfig,
    MeshConfig,
    ModelConfig,
    PackingConfig,
    RunConfig,
    SamplingConfig,
    SftConfig,
)
from configs.sections.evaluation import HELD_OUT
from configs.sections.prompts import HUGGING_FACE

DEFAULT_RESPONSE_TOKENS = 1024
DEFAULT_PROMPT_TOKENS = 3072
"""Tokens for prompts in addition to the longest response, as far as the context allows."""
_NAMED = re.compile(r"([A-Za-z0-9_-]{1,64})=(.*)")
_NO_NAME = re.compile(r"[^A-Za-z0-9_-]+")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalRequest:
    """Command line of an evaluation; None or 0 means unset."""

    prompts: Sequence[str] = ()
    k: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    limit: int | None = None
    verifier: str | None = None


def prompt_set(text: str) -> tuple[str, EvaluationSet]:
    """Parses one --prompts, `[NAME=]SOURCE`, into (name, set); SOURCE is as in the help of --prompts."""
    match = _NAMED.fullmatch(text)
    name, source = (match[1], match[2]) if match else ("", text)
    if not source:
        raise ValueError(
            "--prompts: expected a file, hf:DATASET, task:FAMILY, environment:NAME or heldout, optionally after "
            f"NAME=, got {text!r}"
        )
    kind, _, what = source.partition(":")
    if source == HELD_OUT:
        return HELD_OUT, EvaluationSet()
    if kind == "task" and what:
        return name or _as_name(what), EvaluationSet(task=what)
    if kind == "environment" and what:
        return name or _as_name(what), EvaluationSet(environment=what)
    if source.startswith(HUGGING_FACE):
        return name or _as_name(source.removeprefix(HUGGING_FACE).rstrip("/").rpartition("/")[2]), EvaluationSet(
            path=source
        )
    return name or _as_name(pathlib.Path(source).name.partition(".")[0]), EvaluationSet(path=source)


def _as_name(text: str) -> str:
    return _NO_NAME.sub("-", text).strip("-")[:64] or "set"


def default_base(model: pathlib.Path) -> Config:
    """Returns the config for an evaluation without a run or a preset; raises ValueError for an invalid model folder."""
    window = model_number(model, "max_position_embeddings")
    response_tokens = min(DEFAULT_RESPONSE_TOKENS, window // 2)
    return Config(
        preset="evaluate",
        run=RunConfig(name="evaluate"),
        model=ModelConfig(max_tokens=min(window, response_tokens + DEFAULT_PROMPT_TOKENS), served_dtype=_dtype(model)),
        sampling=SamplingConfig(max_response_tokens=response_tokens),
        packing=PackingConfig(row_tokens=window),
    )


def resolve_config(base: Config, asked: EvalRequest, given: Mapping[str, str], model: pathlib.Path) -> Config:
    """Returns the evaluation's config: the base config with the command line, for this model.

    Without --prompts the base's own sets are evaluated. With --prompts or --k the default temperature is 0 for one
    sample per problem and 1 for more, unless the set or the base sets a temperature. Adapters are off, because the
    folder's weights are complete. `given` are the --config.section.field=value overrides by dotted path.
    """
    window, sets = model_number(model, "max_position_embeddings"), _sets(base.evaluation, asked.prompts)
    response_tokens = asked.max_tokens or _response_tokens(base, window)
    longest = max([response_tokens, *(one.max_tokens for one in sets.values() if not asked.max_tokens)])
    if longest >= window:
        raise ValueError(
            f"max_tokens: responses of {longest} tokens leave no space for a prompt; the context of {model} is "
            f"{window} tokens"
        )
    room = base.model.max_tokens - base.sampling.max_response_tokens
    raw = dataclasses.asdict(base)
    raw["model"] |= {"path": str(model), "max_tokens": max(base.model.max_tokens, min(window, longest + room))}
    raw["packing"] |= {"row_tokens": max(window, base.packing.row_tokens)}
    raw["mesh"] = dataclasses.asdict(MeshConfig())
    raw["learner"] |= {"num_processes": 1}
    raw["sampling"] |= {"max_response_tokens": response_tokens}
    _reset_training(raw)
    raw["publish"] |= {"probe_every_n_publishes": 0, "lora": "merged"}
    raw["evaluation"] |= {"sets": {name: dataclasses.asdict(one) for name, one in sets.items()}}
    if HELD_OUT in sets:
        raw["evaluation"]["num_problems"] = _limited(base.evaluation.num_problems, asked.limit)
    if asked.verifier is not None:
        raw["prompts"] |= {"verifier": asked.verifier, "rewards": {}}
    raw = overrides.merge(raw, given)
    evaluation = raw["evaluation"]
    evaluation["sets"] = {
        name: _apply_flags(name, one, evaluation, asked, given) for name, one in evaluation["sets"].items()
    }
    config = overrides.from_dict(raw)
    if config.lora.is_on:
        raise ValueError(
            f"lora.rank={config.lora.rank} has no effect: the weights of the folder are evaluated (with --run_dir, "
            "after merging the adapters); remove it"
        )
    if any(not one.has_source for one in config.evaluation.sets.values()):
        return config
    # Without the held-out set, its source need not exist.
    return dataclasses.replace(config, evaluation=dataclasses.replace(config.evaluation, num_problems=0))


def _response_tokens(base: Config, window: int) -> int:
    """Returns the tokens of a response: as sampling says, but a supervised run rarely does. Then those of its rows."""
    said = base.sampling.max_response_tokens
    if not base.loss.is_supervised or said != SamplingConfig().max_response_tokens:
        return said
    return min(DEFAULT_RESPONSE_TOKENS, base.model.max_tokens, window // 2)


def _reset_training(raw: dict[str, Any]) -> None:
    """Sets what only training reads to values that no other field of an evaluation contradicts."""
    for name, section in (("loss", LossConfig), ("sft", SftConfig), ("lora", LoraConfig), ("critic", CriticConfig)):
        raw[name] = dataclasses.asdict(section())
    raw["model"] |= {"routing_replay": False}
    raw["packing"] |= {"whole_groups": False}
    raw["rounds"] |= {"samples_per_group": max(2, raw["rounds"]["samples_per_group"])}
    raw["prompts"] |= {"teacher_field": "", "num_epochs": 0}
    for source in raw["prompts"]["mixture"].values():
        source["teacher"] = ""


def _apply_flags(
    name: str, one: Mapping[str, Any], evaluation: Mapping[str, Any], asked: EvalRequest, given: Mapping[str, str]
) -> dict[str, Any]:
    """Returns a set's fields with the flags applied, except those set by --config.evaluation.sets.NAME.FIELD."""
    said = {"k": asked.k, "temperature": asked.temperature, "top_p": asked.top_p}
    is_generated = bool(one.get("task") or one.get("environment"))
    num_problems = one.get("num_problems") or (evaluation["num_problems"] if is_generated else 0)
    said |= {"max_tokens": asked.max_tokens, "num_problems": _limited(num_problems, asked.limit)}
    found = dict(one) | {
        field: value
        for field, value in said.items()
        if value is not None and f"evaluation.sets.{name}.{field}" not in given
    }
    # A config always has a temperature, so only one that differs from the default counts as set.
    is_said = (
        found.get("temperature") is not None
        or "evaluation.temperature" in given
        or evaluation["temperature"] != EvaluationConfig().temperature
    )
    if not is_said and (asked.prompts or asked.k):
        found["temperature"] = 1.0 if (found.get("k") or evaluation["k"]) > 1 else 0.0
    return found


def _limited(num_problems: int, limit: int | None) -> int:
    """Returns a number of problems (0: all) after --limit."""
    if limit is None:
        return num_problems
    return min(num_problems, limit) if num_problems else limit


def _sets(evaluation: EvaluationConfig, prompts: Sequence[str]) -> dict[str, EvaluationSet]:
    """Returns the sets of the command line, or all of the base's, including the held-out set if it has one."""
    if not prompts:
        held_out = {HELD_OUT: EvaluationSet()} if evaluation.num_problems else {}
        return held_out | dict(evaluation.sets)
    named: dict[str, EvaluationSet] = {}
    for text in prompts:
        name, one = prompt_set(text)
        if name == HELD_OUT:
            one = evaluation.sets.get(HELD_OUT, one)
        if name in named:
            raise ValueError(f"two --prompts are named {name!r}; rename one, as in --prompts=NAME={text}")
        named[name] = one
    return named


def model_number(model: pathlib.Path, name: str) -> int:
    """Returns an integer of the model's config.json, or of its `text_config`; raises ValueError if it is missing."""
    config = _read(model)
    for part in (config, config.get("text_config") or {}):
        if isinstance(part.get(name), int):
            return part[name]
    raise ValueError(f"{model / 'config.json'} has no {name}")


def _dtype(model: pathlib.Path) -> Literal["float32", "bfloat16"]:
    config = _read(model)
    said = config.get("dtype") or config.get("torch_dtype") or (config.get("text_config") or {}).get("dtype")
    return "float32" if said in (None, "float32") else "bfloat16"


def _read(model: pathlib.Path) -> dict[str, Any]:
    file = model / "config.json"
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as e:
        raise ValueError(f"{model} is not a Hugging Face folder: cannot read config.json ({e.strerror})") from e
    except ValueError as e:
        raise ValueError(f"{file} is not JSON: {e}") from e
    if not isinstance(found, dict):
        raise ValueError(f"{file} is not a JSON object")
    return found
