"""Differences between families of decoders. Imports no jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

from learner.model.families.config_fields import Rope, read_rope

Raw = Mapping[str, Any]
"""Parsed config.json, with the family's defaults for missing fields."""
Windows = tuple[int | None, tuple[bool, ...]]
"""Attention window in tokens, and True per windowed layer; (None, ()) without windows."""
VLLM_ALONE = "vLLM would compute it and transformers wouldn't"
"""Reason to reject a config.json (`Only.why`)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HfField:
    """Field of a family's config.json that becomes a field of `Architecture`."""

    key: str
    kind: type
    optional: bool = False
    """True if null is a valid value."""
    alias: str | None = None
    """Alternative key."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Only:
    """Supported values of a config.json field; the first is the meaning of its absence."""

    values: tuple[Any, ...]
    why: str = "nothing else is computed"


def no_windows(raw: Raw, num_layers: int) -> Windows:
    """Returns no windows, for families without them."""
    return None, ()


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Family:
    """Model family: features of its decoder and their config.json keys."""

    model_type: str
    architecture: str
    """The allowed entry of `architectures`."""

    qk_norm: bool = False
    """True if queries and keys are RMS-normalized per head before the rotation."""
    out_norms: bool = False
    """True if the outputs of attention and MLP are RMS-normalized before the residual add."""
    norm_offset: float = 0.0
    """Number added to a norm's weight before it multiplies."""
    activation: Literal["silu", "gelu_tanh"] = "silu"
    """Activation of the MLP's gate; gelu_tanh is GELU's tanh approximation."""
    scaled_embeddings: bool = False
    """True if embeddings are multiplied by sqrt(hidden_size), rounded to the compute dtype."""
    local_rope: bool = False
    """True if windowed layers have a separate rotation."""
    attention_biases: tuple[tuple[bool, bool], ...] = ((False, False), (True, True))
    """Allowed (q, k and v bias; o bias) pairs; `attention_bias` selects one of several."""
    derives_heads: bool = False
    """True if a missing `head_dim` means hidden_size / num_attention_heads, and null key heads mean as many as query
    heads."""

    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Hugging Face names within a layer by Flax path, where they differ from `bridge.param_names`."""
    activation_key: str = "hidden_act"
    fields: Mapping[str, HfField] = dataclasses.field(default_factory=dict)
    """Config.json fields of `Architecture` fields that not every family has."""
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Defaults that transformers and vLLM share for fields missing in config.json."""
    only: Mapping[str, Only] = dataclasses.field(default_factory=dict)
    """Fields that would change the computation; other values raise ValueError."""
    check: Callable[[Raw], None] = lambda raw: None
    """Raises ValueError for conditions that `only` cannot express."""
    read_rope: Callable[[Raw], Rope] = read_rope
    read_windows: Callable[[Raw, int], Windows] = no_windows
    """Reads the windows from (raw, number of layers)."""

    @property
    def activation_name(self) -> str:
        """Name of the activation in config.json."""
        return {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}[self.activation]
