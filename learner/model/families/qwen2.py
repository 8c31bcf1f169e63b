"""Qwen2 and Qwen2.5: biases on q, k and v."""

from learner.model.families import windows
from learner.model.families.family import Family, Only

QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    attention_biases=((True, False),),
    derives_heads=True,
    only={"dual_chunk_attention_config": Only(values=(None,))},
    read_windows=windows.from_layer,
)
