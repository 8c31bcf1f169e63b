"""Llama 1 to 3.x and what is built like it, SmolLM2 among others: the plainest of the families.

Early configs leave out what later ones say; the defaults are those of transformers' `LlamaConfig`, which vLLM uses too.
"""

import functools

from learner.model.families.family import VLLM_ALONE, Family, HfField, Only
from learner.model.hf.fields import read_rope

LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    derives_heads=True,
    fields={"mlp_bias": HfField(key="mlp_bias", kind=bool)},
    defaults={
        "attention_bias": False,
        "mlp_bias": False,
        "num_key_value_heads": None,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    },
    only={
        "bias": Only(values=(None, False), why=VLLM_ALONE),
        "qkv_bias": Only(values=(None,), why=VLLM_ALONE),
        "sliding_window": Only(values=(None,), why=VLLM_ALONE),
        "layer_types": Only(values=(None,), why=VLLM_ALONE),
        "is_causal": Only(values=(True,)),
    },
    read_rope=functools.partial(read_rope, default_theta=1e4),
)
