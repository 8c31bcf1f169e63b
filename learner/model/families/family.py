"""What may differ between two families of decoders. Pure: no jax, no arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

from learner.model.families.config_fields import Rope, read_rope

Raw = Mapping[str, Any]
"""A parsed config.json, with the family's defaults where it has no such field."""
Windows = tuple[int | None, tuple[bool, ...]]
"""The attention window in tokens, and which layers have it; (None, ()) when none does."""
VLLM_ALONE = "vLLM would compute it and transformers wouldn't"
"""Why a family refuses what its config.json says (`Only.why`)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HfField:
    """A field of a family's config.json that becomes a field of `Architecture`."""

    key: str
    kind: type
    optional: bool = False
    """null is a value."""
    alias: str | None = None
    """Another key of the same meaning."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Only:
    """The values of a config.json's field that are computed; the first is what its absence means."""

    values: tuple[Any, ...]
    why: str = "nothing else is computed"


def no_windows(raw: Raw, num_layers: int) -> Windows:
    """Of a family that has none."""
    return None, ()


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Family:
    """One family: what its decoder has, and how its config.json says so."""

    model_type: str
    architecture: str
    """The only entry of `architectures`."""

    qk_norm: bool = False
    """Queries and keys are RMS-normalised per head before the rotation."""
    out_norms: bool = False
    """What attention and MLP add to the residual stream is RMS-normalised too."""
    norm_offset: float = 0.0
    """Added to a norm's weight before it multiplies."""
    activation: Literal["silu", "gelu_tanh"] = "silu"
    """Of the MLP's gate; gelu_tanh is GELU's tanh approximation."""
    scaled_embeddings: bool = False
    """Embeddings are multiplied by sqrt(hidden_size), rounded to the compute dtype."""
    local_rope: bool = False
    """Layers with a window have a rotation of their own."""
    attention_biases: tuple[tuple[bool, bool], ...] = ((False, False), (True, True))
    """What (q, k and v; o) may be; of several, `attention_bias` says which."""
    derives_heads: bool = False
    """Without `head_dim` it is hidden_size / num_attention_heads, and null key heads are as many as query heads."""

    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Flax path -> Hugging Face name within a layer, where it isn't `bridge.param_names`' own."""
    activation_key: str = "hidden_act"
    fields: Mapping[str, HfField] = dataclasses.field(default_factory=dict)
    """Field of `Architecture` that not every family has -> where config.json keeps it."""
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """What transformers and vLLM both take where config.json has no such field."""
    only: Mapping[str, Only] = dataclasses.field(default_factory=dict)
    """Fields that would change the numbers; another value is refused by name."""
    check: Callable[[Raw], None] = lambda raw: None
    """Refuses what `only` can't say."""
    read_rope: Callable[[Raw], Rope] = read_rope
    read_windows: Callable[[Raw, int], Windows] = no_windows
    """(raw, number of layers)"""

    @property
    def activation_name(self) -> str:
        """As config.json calls it."""
        return {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}[self.activation]
