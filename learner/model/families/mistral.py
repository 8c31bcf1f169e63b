"""Mistral: Llama without biases, and with a window in every layer where its config has one."""

import functools

from learner.model.families import windows
from learner.model.families.family import VLLM_ALONE, Family, Only
from learner.model.hf.fields import read_rope

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
    read_windows=windows.all_if_given,
)
