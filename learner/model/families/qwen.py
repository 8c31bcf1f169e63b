"""Qwen2, Qwen3 and Qwen3-MoE families.

`router_aux_loss_coef` is not used: a balancing loss would bias the policy gradient, and reinforcement learning starts
from a trained router. It stays in the saved config.json.
"""

from learner.model.families import sliding_window
from learner.model.families.config_fields import refuse
from learner.model.families.family import Family, HfField, Only, Raw

QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    attention_biases=((True, False),),
    derives_heads=True,
    only={"dual_chunk_attention_config": Only(values=(None,))},
    read_windows=sliding_window.from_layer,
)


QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    qk_norm=True,
    only={"dual_chunk_attention_config": Only(values=(None,))},
    read_windows=sliding_window.from_layer,
)


def _check(raw: Raw) -> None:
    # transformers 5 writes the number of experts under the name of its expert-parallel code.
    aliased = raw.get("num_local_experts")
    if aliased is not None and raw.get("num_experts", aliased) != aliased:
        refuse("num_experts", raw["num_experts"], f"num_local_experts, {aliased}")
    if raw.get("shared_expert_intermediate_size"):
        refuse("shared_expert_intermediate_size", raw["shared_expert_intermediate_size"], "absent")


QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    qk_norm=True,
    attention_biases=((False, False),),
    fields={
        "num_experts": HfField(key="num_experts", kind=int, alias="num_local_experts"),
        "num_experts_per_token": HfField(key="num_experts_per_tok", kind=int),
        "moe_intermediate_size": HfField(key="moe_intermediate_size", kind=int),
        "norm_topk_prob": HfField(key="norm_topk_prob", kind=bool),
    },
    only={
        "decoder_sparse_step": Only(values=(1,), why="every layer has experts"),
        "mlp_only_layers": Only(values=([], None), why="every layer has experts"),
        "attention_bias": Only(values=(False,), why="vLLM drops the bias of a MoE model's o_proj"),
        "dual_chunk_attention_config": Only(values=(None,)),
    },
    check=_check,
    read_windows=sliding_window.all_if_used,
)
