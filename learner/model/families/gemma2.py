"""Gemma 2: every other layer has a window, and attention scores and logits are soft-capped."""

import functools

from learner.model.families import windows
from learner.model.families.family import Family, HfField, Only
from learner.model.hf.fields import read_rope

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
    read_windows=windows.all_but_every_second,
)
