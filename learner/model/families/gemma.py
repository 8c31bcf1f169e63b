"""Gemma 2 and Gemma 3 families.

A transformers 5 config has one rotation per kind of layer in `rope_parameters`. A transformers 4 config has
`rope_theta` and `rope_scaling` for global layers, and `rope_local_base_freq` for local ones.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from learner.model.families import sliding_window
from learner.model.families.config_fields import Rope, need, read_rope, read_scaling, refuse
from learner.model.families.family import Family, HfField, Only, Raw

NAMES = {
    "layers/attention_out_norm/scale": "post_attention_layernorm.weight",
    "layers/post_norm/scale": "pre_feedforward_layernorm.weight",
    "layers/mlp_out_norm/scale": "post_feedforward_layernorm.weight",
}


GEMMA2 = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    out_norms=True,
    norm_offset=1.0,
    activation="gelu_tanh",
    scaled_embeddings=True,
    names=NAMES,
    activation_key="hidden_activation",
    fields={
        "query_pre_attn_scalar": HfField(key="query_pre_attn_scalar", kind=float),
        "attention_soft_cap": HfField(key="attn_logit_softcapping", kind=float, optional=True),
        "logit_soft_cap": HfField(key="final_logit_softcapping", kind=float, optional=True),
    },
    defaults={
        "attention_bias": False,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "head_dim": 256,
        "max_position_embeddings": 8192,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-6,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
    },
    only={
        "tie_word_embeddings": Only(values=(True,), why="vLLM has no other head for this family"),
        "use_bidirectional_attention": Only(values=(None, False)),
        "is_causal": Only(values=(True,)),
        "sliding_window_pattern": Only(values=(2,), why="transformers and vLLM take no other, and say nothing"),
    },
    read_rope=functools.partial(read_rope, default_theta=1e4),
    read_windows=sliding_window.all_but_every_second,
)


_GLOBAL, _LOCAL = "full_attention", "sliding_attention"
_THETAS = {_GLOBAL: 1e6, _LOCAL: 1e4}


def _read_two_ropes(raw: Raw) -> Rope:
    both = raw.get("rope_parameters")
    if not both:
        local = need({"rope_local_base_freq": _THETAS[_LOCAL]} | dict(raw), "rope_local_base_freq", float)
        return read_rope(raw, default_theta=_THETAS[_GLOBAL])._replace(local_theta=local)
    if not isinstance(both, Mapping):
        refuse("rope_parameters", both, f"an object of {_GLOBAL} and {_LOCAL}")
    for field in ("rope_scaling", "rope_theta", "rope_local_base_freq"):
        if raw.get(field) is not None:
            refuse(field, raw[field], "absent, because rope_parameters defines it per layer type")
    for kind in both:
        if kind not in (_GLOBAL, _LOCAL):
            refuse(f"rope_parameters.{kind}", both[kind], f"{_GLOBAL} and {_LOCAL} only")
    ropes = {kind: {"rope_theta": theta} | dict(both.get(kind) or {}) for kind, theta in _THETAS.items()}
    homes = {kind: f"rope_parameters.{kind}" for kind in ropes}
    scalings = {kind: read_scaling(homes[kind], rope, raw) for kind, rope in ropes.items()}
    if scalings[_LOCAL] is not None:
        refuse(homes[_LOCAL], both[_LOCAL], "rope_type 'default' (local layers are not scaled)")
    if (scaling := scalings[_GLOBAL]) is not None and scaling.kind == "yarn" and not scaling.truncate:
        refuse(f"{homes[_GLOBAL]}.truncate", False, "true or absent (transformers ignores it in a layer type's object)")
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
    names=NAMES,
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
    read_windows=sliding_window.all_but_every_nth,
)
