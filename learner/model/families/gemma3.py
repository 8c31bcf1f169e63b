"""Gemma 3, the text model: local layers with a window and a rotation of their own between global ones.

A config of transformers 5 has a rotation for each kind of layer in `rope_parameters`; one of transformers 4 has
`rope_theta` and `rope_scaling` for the global layers and `rope_local_base_freq` for the local ones.
"""

from __future__ import annotations

from collections.abc import Mapping

from learner.model.families import gemma2, windows
from learner.model.families.family import Family, HfField, Only, Raw
from learner.model.hf.fields import Rope, need, read_rope, read_scaling, refuse

_GLOBAL, _LOCAL = "full_attention", "sliding_attention"
_THETAS = {_GLOBAL: 1e6, _LOCAL: 1e4}
"""Where the config has none."""


def _read_two_ropes(raw: Raw) -> Rope:
    both = raw.get("rope_parameters")
    if not both:
        local = need({"rope_local_base_freq": _THETAS[_LOCAL]} | dict(raw), "rope_local_base_freq", float)
        return read_rope(raw, default_theta=_THETAS[_GLOBAL])._replace(local_theta=local)
    if not isinstance(both, Mapping):
        refuse("rope_parameters", both, f"an object of {_GLOBAL} and {_LOCAL}")
    for field in ("rope_scaling", "rope_theta", "rope_local_base_freq"):
        if raw.get(field) is not None:
            refuse(field, raw[field], "absent, as rope_parameters says it for each kind of layer")
    for kind in both:
        if kind not in (_GLOBAL, _LOCAL):
            refuse(f"rope_parameters.{kind}", both[kind], f"{_GLOBAL} and {_LOCAL} only")
    ropes = {kind: {"rope_theta": theta} | dict(both.get(kind) or {}) for kind, theta in _THETAS.items()}
    homes = {kind: f"rope_parameters.{kind}" for kind in ropes}
    scalings = {kind: read_scaling(homes[kind], rope, raw) for kind, rope in ropes.items()}
    if scalings[_LOCAL] is not None:
        refuse(homes[_LOCAL], both[_LOCAL], "rope_type 'default' (local layers are not scaled)")
    thetas = {kind: need(rope, "rope_theta", float) for kind, rope in ropes.items()}
    return Rope(thetas[_GLOBAL], scalings[_GLOBAL], thetas[_LOCAL])


GEMMA3 = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    qk_norm=True,
    out_norms=True,
    norm_offset=1.0,
    activation="gelu_tanh",
    scaled_embeddings=True,
    local_rope=True,
    names=gemma2.NAMES,
    activation_key="hidden_activation",
    fields={
        "query_pre_attn_scalar": HfField(key="query_pre_attn_scalar", kind=float),
        "logit_soft_cap": HfField(key="final_logit_softcapping", kind=float, optional=True),
    },
    defaults={
        "attention_bias": False,
        "final_logit_softcapping": None,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-6,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "tie_word_embeddings": True,
        "vocab_size": 262208,
    },
    only={
        "attn_logit_softcapping": Only(values=(None,), why="transformers and vLLM both leave it out of this family"),
        "use_bidirectional_attention": Only(values=(False, None)),
        "is_causal": Only(values=(True,)),
    },
    read_rope=_read_two_ropes,
    read_windows=windows.all_but_every_nth,
)
