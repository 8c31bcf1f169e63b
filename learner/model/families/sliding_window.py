"""Readers of windowed layers from the forms that config.json files use.

All raise ValueError for fields that contradict each other, that are invalid, or that transformers and vLLM read
differently.
"""

from __future__ import annotations

from learner.model.families.config_fields import need, refuse
from learner.model.families.family import Raw, Windows

_KINDS = ("full_attention", "sliding_attention")


def from_layer(raw: Raw, num_layers: int) -> Windows:
    """Reads Qwen2 and Qwen3: `layer_types` decides; without it, layers from `max_window_layers` on are windowed."""
    types = _layer_types(raw, num_layers)
    if not _is_used(raw, types):
        return None, ()
    first = raw.get("max_window_layers", 0) if types is not None else need(raw, "max_window_layers", int)
    windowed = types if types is not None else tuple(i >= first for i in range(num_layers))
    # vLLM asserts on a mix, unless max_window_layers says that there is no window, and then it drops the window.
    if len(set(windowed)) > 1 and first == num_layers:
        refuse("layer_types", raw["layer_types"], f"no window in any layer (max_window_layers = {first})")
    return _windows(raw, windowed)


def all_if_used(raw: Raw, num_layers: int) -> Windows:
    """Reads Qwen3-MoE: every layer is windowed if `use_sliding_window` is true."""
    types, windowed = _layer_types(raw, num_layers), (True,) * num_layers
    if not _is_used(raw, types):
        return None, ()
    if types is not None and types != windowed:
        refuse("layer_types", raw["layer_types"], "absent (Qwen3-MoE windows every layer or none)")
    return _windows(raw, windowed)


def all_if_given(raw: Raw, num_layers: int) -> Windows:
    """Reads Mistral: every layer is windowed if `sliding_window` is a number."""
    types, windowed = _layer_types(raw, num_layers), (raw.get("sliding_window") is not None,) * num_layers
    if types is not None and types != windowed:
        refuse("layer_types", raw["layer_types"], "absent (every layer has the window, or none)")
    return _windows(raw, windowed)


def all_but_every_second(raw: Raw, num_layers: int) -> Windows:
    """Reads Gemma 2: `layer_types` decides; without it every second layer is global."""
    types = _layer_types(raw, num_layers)
    return _windows(raw, types if types is not None else _all_but_every(2, num_layers))


def all_but_every_nth(raw: Raw, num_layers: int) -> Windows:
    """Reads Gemma 3: `layer_types` decides; without it every `sliding_window_pattern`-th layer is global."""
    types = _layer_types(raw, num_layers)
    if types is not None:
        return _windows(raw, types)
    n = need(raw, "sliding_window_pattern", int)
    if n < 1:
        refuse("sliding_window_pattern", n, "a positive number of layers")
    return _windows(raw, _all_but_every(n, num_layers))


def _layer_types(raw: Raw, num_layers: int) -> tuple[bool, ...] | None:
    """Returns True per windowed layer in `layer_types`, or None without that field."""
    found = raw.get("layer_types")
    if found is None:
        return None
    if not isinstance(found, list) or len(found) != num_layers or not set(found) <= set(_KINDS):
        refuse("layer_types", found, f"one of {_KINDS} for each of {num_layers} layers")
    return tuple(kind == "sliding_attention" for kind in found)


def _all_but_every(n: int, num_layers: int) -> tuple[bool, ...]:
    return tuple((i + 1) % n != 0 for i in range(num_layers))


def _is_used(raw: Raw, types: tuple[bool, ...] | None) -> bool:
    if raw.get("use_sliding_window") and raw.get("sliding_window") is not None:
        return True
    if types is not None and any(types):
        refuse("layer_types", raw["layer_types"], "'full_attention' only, or use_sliding_window and sliding_window")
    return False


def _windows(raw: Raw, windowed: tuple[bool, ...]) -> Windows:
    if not any(windowed):
        return None, ()
    window = need(raw, "sliding_window", int)
    if window < 1:
        refuse("sliding_window", window, "a positive number of tokens")
    return window, windowed
