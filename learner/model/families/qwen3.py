"""Qwen3: queries and keys are normalised per head."""

from learner.model.families import windows
from learner.model.families.family import Family, Only

QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    qk_norm=True,
    only={"dual_chunk_attention_config": Only(values=(None,))},
    read_windows=windows.from_layer,
)
