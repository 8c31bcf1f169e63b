"""Llama and Mistral families.

Early configs omit fields; the defaults are those of transformers' `LlamaConfig` and `MistralConfig`, which vLLM shares.
"""

import functools

from learner.model.families import sliding_window
from learner.model.families.config_fields import read_rope
from learner.model.families.family import VLLM_ALONE, Family, HfField, Only

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


MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    attention_biases=((False, False),),
    derives_heads=True,
    defaults={
        "max_position_embeddings": 4096 * 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-6,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
    },
    only={
        "attention_bias": Only(values=(False,), why=VLLM_ALONE),
        "bias": Only(values=(None, False), why=VLLM_ALONE),
        "mlp_bias": Only(values=(False,), why=VLLM_ALONE),
        "qkv_bias": Only(values=(None,), why=VLLM_ALONE),
        "llama_4_scaling": Only(values=(None,), why=VLLM_ALONE),
        "is_causal": Only(values=(True,)),
    },
    read_rope=functools.partial(read_rope, default_theta=1e4),
    read_windows=sliding_window.all_if_given,
)
