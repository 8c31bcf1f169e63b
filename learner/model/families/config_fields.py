"""Field validation for a `config.json`, and reading of the rotary embedding.

Fields that transformers (the reference model) and vLLM (the engine) read differently are rejected: a learner that
agrees with only one of them trains on wrong log-probabilities.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, NoReturn

ROPE_HOMES = ("rope_parameters", "rope_scaling")
"""Config keys that hold the scaling: transformers 5's name, then the older one."""
_YARN_FIELDS = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")
_ROPE_FIELDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings", *_YARN_FIELDS),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Scaling of the rotary frequencies; `learner.model.rope` has the equations."""

    kind: Literal["linear", "yarn", "llama3"]
    factor: float
    original_length: int = 0
    """Context before scaling, in tokens; 0 for 'linear', which does not use it."""
    attention_factor: float = 1.0
    """Factor on queries and keys (yarn)."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0


class Rope(NamedTuple):
    """Rotary embedding of a model."""

    theta: float
    scaling: RopeScaling | None = None
    local_theta: float | None = None
    """Base of windowed layers, unscaled; None if all layers share one rotation."""


def refuse(field: str, got: object, wanted: str) -> NoReturn:
    """Raises the ValueError for a field."""
    what, semicolon, hint = wanted.partition("; ")
    raise ValueError(f"config.json: {field}: expected {what}, got {got!r}{semicolon}{hint}")


def need(raw: Mapping[str, Any], field: str, kind: type) -> Any:
    """Returns a required field of that type (ints pass for floats), or raises ValueError."""
    if field not in raw:
        raise ValueError(f"config.json: {field}: expected {kind.__name__}, but the field is missing")
    return typed(field, raw[field], kind)


def typed(field: str, value: Any, kind: type) -> Any:
    """Returns the value if it has that type (ints pass for floats), else raises ValueError."""
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        refuse(field, value, kind.__name__)
    return value


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Returns the object in a config.json (the file or its folder), or raises FileNotFoundError or ValueError."""
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise FileNotFoundError(f"no model config at {path}")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(raw).__name__}")
    return raw


def read_rope(raw: Mapping[str, Any], *, default_theta: float | None = None) -> Rope:
    """Returns the rotary base and scaling from either key; `default_theta` replaces a missing base.

    Raises ValueError if the base is missing, the two keys disagree, or the scaling is unsupported. 'dynamic' is
    rejected: transformers derives its frequencies from the longest sequence of the batch, vLLM from the configured
    maximum.
    """
    homes: dict[str, Mapping[str, Any]] = {}
    for home in ROPE_HOMES:
        rope = raw.get(home)
        if rope is not None and not isinstance(rope, Mapping):
            refuse(home, rope, "an object or null")
        if rope is not None:
            homes[home] = rope
    bases = {
        f"{home}.rope_theta": need(rope, "rope_theta", float) for home, rope in homes.items() if "rope_theta" in rope
    }
    if "rope_theta" in raw:
        bases["rope_theta"] = need(raw, "rope_theta", float)
    scalings = {home: read_scaling(home, rope, raw) for home, rope in homes.items()}
    if not bases and default_theta is not None:
        bases["rope_theta"] = default_theta
    if not bases:
        raise ValueError("config.json: rope_theta: expected it or rope_parameters.rope_theta, but both are missing")
    if len(set(bases.values())) > 1:
        refuse("rope_theta", bases, "one value")
    if len(set(scalings.values())) > 1:
        refuse("rope_scaling", raw["rope_scaling"], f"the same as rope_parameters, {raw['rope_parameters']!r}")
    return Rope(next(iter(bases.values())), next(iter(scalings.values()), None))


def read_scaling(home: str, rope: Mapping[str, Any], raw: Mapping[str, Any]) -> RopeScaling | None:
    """Returns the scaling under one key of the config `raw`, or None; raises ValueError for an invalid field."""
    kinds = {f"{home}.{key}": rope[key] or "default" for key in ("rope_type", "type") if key in rope}
    if len(set(kinds.values())) > 1:
        refuse(f"{home}.type", rope["type"], f"the same as rope_type, {rope['rope_type']!r}")
    field, kind = next(iter(kinds.items()), (f"{home}.rope_type", "default"))
    kind = "default" if kind == "none" else kind
    if kind not in _ROPE_FIELDS:
        refuse(field, kind, f"one of {sorted(_ROPE_FIELDS)}")
    for key in rope:
        if key not in ("rope_type", "type", "rope_theta", *_ROPE_FIELDS[kind]):
            refuse(f"{home}.{key}", rope[key], f"absent (not a field of {kind!r})")
    if kind == "default":
        return None
    numbers = {name: _number(home, rope, name) for name in _ROPE_FIELDS[kind] if name in rope and name != "truncate"}
    if kind == "linear" and isinstance(rope.get("factor"), int):
        refuse(f"{home}.factor", rope["factor"], "a float such as 2.0 (vLLM takes an int for a list)")
    factor = numbers.get("factor")
    if factor is None or factor < 1:
        refuse(f"{home}.factor", rope.get("factor"), "a number >= 1")
    if kind == "linear":
        return RopeScaling(kind="linear", factor=factor)
    if raw.get("original_max_position_embeddings") is not None:
        refuse("original_max_position_embeddings", raw["original_max_position_embeddings"], f"it inside {home} only")
    # transformers and vLLM both default to the model's maximum.
    maximum = need(raw, "max_position_embeddings", int)
    original = typed(
        f"{home}.original_max_position_embeddings", rope.get("original_max_position_embeddings", maximum), int
    )
    if original < 1:
        refuse(f"{home}.original_max_position_embeddings", original, "a positive number")
    if kind == "llama3":
        low, high = numbers.get("low_freq_factor"), numbers.get("high_freq_factor")
        if low is None or high is None or not 0 < low < high:
            refuse(f"{home}.high_freq_factor", (low, high), "0 < low_freq_factor < high_freq_factor")
        return RopeScaling(
            kind="llama3", factor=factor, original_length=original, low_freq_factor=low, high_freq_factor=high
        )
    if original * factor < maximum:
        refuse(
            f"{home}.factor",
            factor,
            f"at least max_position_embeddings / original_max_position_embeddings = {maximum / original} "
            "(vLLM has no rotation beyond their product)",
        )
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_length=original,
        attention_factor=_yarn_attention_factor(numbers, factor),
        beta_fast=numbers.get("beta_fast", 32.0),
        beta_slow=numbers.get("beta_slow", 1.0),
        truncate=typed(f"{home}.truncate", rope.get("truncate", True), bool),
    )


def _number(home: str, rope: Mapping[str, Any], name: str) -> float:
    value = typed(f"{home}.{name}", rope[name], float)
    if not math.isfinite(value) or value <= 0:
        refuse(f"{home}.{name}", rope[name], "a positive number")
    return value


def _yarn_attention_factor(numbers: Mapping[str, float], factor: float) -> float:
    """Returns attention_factor, else m(mscale) / m(mscale_all_dim) with m(x) = 0.1 x ln(factor) + 1, else m(1)."""

    def magnitude(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0

    if "attention_factor" in numbers:
        return numbers["attention_factor"]
    if "mscale" in numbers and "mscale_all_dim" in numbers:
        return magnitude(numbers["mscale"]) / magnitude(numbers["mscale_all_dim"])
    return magnitude(1.0)
