"""Memory and update time of a compiled step on a TPU chip.

Memory is XLA's own analysis. Time is computed from the model's FLOPs, not from the compiled program:

    update_s = (model FLOPs + recomputed FLOPs + FLOPs of scoring) / (chips x peak x utilization)

`UTILIZATION` is an assumption, which includes the optimizer step, collectives and the host.
"""

import dataclasses
import math
from typing import Any

from configs.schema import Config
from learner.metrics import flops
from learner.metrics.flops import TpuChip
from learner.model.architecture import Architecture

UTILIZATION = {"v5e": 0.5, "v5p": 0.5, "v6e": 0.4}
"""Assumed fraction of a chip's bf16 peak, including recomputed FLOPs; not measured. XLA's cycle counts of the presets'
programs gave 0.48 to 0.51 on v5e, 0.32 (experts) to 0.68 on v5p, and 0.41 on v6e."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepEstimate:
    """Memory and time of one update on a slice."""

    hbm_bytes: dict[str, int]
    """Peak bytes per chip, by kind; their sum decides if the step fits."""
    num_micro_batches: int
    num_epochs: int
    """Epochs over the update's batch."""
    model_flops: float
    """FLOPs per update that training requires, over all chips."""
    hardware_flops: float
    """`model_flops` plus recomputed and scoring FLOPs, over all chips."""
    utilization: float
    """Assumed fraction of the peak."""
    update_s: float
    """Seconds per update at that utilization."""
    chip: TpuChip

    @property
    def total_hbm_bytes(self) -> int:
        """Required bytes per chip."""
        return sum(self.hbm_bytes.values())

    @property
    def fits(self) -> bool:
        """True if a chip has enough memory."""
        return self.total_hbm_bytes <= self.chip.hbm_bytes


def estimate(answer: dict[str, Any], config: Config, model: Architecture, family: str) -> StepEstimate:
    """Converts an answer of `launch.tools.compile_tpu.compile_worker` into memory and seconds on a chip generation."""
    n, epochs, chip = num_micro_batches(config), config.rounds.epochs, flops.TPU_CHIPS[family]
    needed, computed, scoring = micro_batch_flops(config, model, answer.get("remat", config.model.remat))
    all_computed = n * (epochs * computed + (scoring if "score" in answer["programs"] else 0.0))
    return StepEstimate(
        hbm_bytes=hbm_bytes(answer),
        num_micro_batches=n,
        num_epochs=epochs,
        model_flops=n * epochs * needed,
        hardware_flops=all_computed,
        utilization=UTILIZATION[family],
        update_s=seconds(all_computed, answer["num_chips"], family),
        chip=chip,
    )


def seconds(computed_flops: float, num_chips: int, family: str) -> float:
    """Returns the seconds of a slice at the assumed utilization."""
    return computed_flops / (num_chips * flops.TPU_CHIPS[family].flops_per_s * UTILIZATION[family])


def micro_batch_flops(config: Config, model: Architecture, remat: str) -> tuple[float, float, float]:
    """Returns the FLOPs per micro-batch: (model, model and recomputed with `remat`, scoring)."""
    tokens, scored, squares = micro_batch_lengths(config)
    work: dict[str, Any] = dict(num_tokens=tokens, num_scored_tokens=scored, sum_squared_lengths=squares)
    needed = flops.model_flops(model, **work, num_adapter_params=flops.adapter_params(model, config.lora))
    recomputed = 0.0
    if remat == "gate":
        width = model.num_experts_per_token * model.moe_intermediate_size or model.intermediate_size
        recomputed = 2.0 * tokens * model.num_layers * model.hidden_size * width
    elif remat in ("full", "attention"):
        pairs = squares if remat == "full" else 0
        recomputed = flops.forward_flops(model, num_tokens=tokens, num_scored_tokens=0, sum_squared_lengths=pairs)
    return needed, needed + recomputed, flops.forward_flops(model, **work)


def micro_batch_lengths(config: Config) -> tuple[int, int, int]:
    """Returns tokens, scored tokens and summed squared lengths of a micro-batch full of longest sequences."""
    longest = config.model.max_tokens
    num_sequences = config.packing.rows * (config.packing.row_tokens // longest)
    return num_sequences * longest, num_sequences * config.sampling.max_response_tokens, num_sequences * longest**2


def num_micro_batches(config: Config) -> int:
    """Returns the micro-batches per update if every sequence has the maximum length."""
    sequences = config.groups_per_update * (1 if config.loss.is_supervised else config.rounds.samples_per_group)
    a_batch = config.packing.rows * (config.packing.row_tokens // config.model.max_tokens)
    return math.ceil(sequences / a_batch)


def hbm_bytes(answer: dict[str, Any]) -> dict[str, int]:
    """Returns the peak bytes per chip by kind.

    The optimizer state is not an argument of `accumulate`, so XLA does not count it there, although it stays in memory.
    Its padded size is the difference between the arguments of `apply` and `accumulate`. A frozen scoring model and the
    base of adapters also stay. The base is an argument of `accumulate` but not of `apply`, and is not counted twice if
    it is the reference.
    """
    state, programs = answer["state_bytes"], answer["programs"]
    memory = {name: p["memory"] for name, p in programs.items()}
    optimizer, base = state["optimizer"], state.get("base", 0)
    if "apply" in memory:
        optimizer = max(
            memory["apply"]["argument"] - memory["accumulate"]["argument"] + base + state["batch"], optimizer
        )
    frozen = max(memory["score"]["argument"] - base - state["batch"], 0) if "score" in memory else 0
    frozen += state.get("reference", 0) + state.get("teachers", 0)
    parts = {"parameters": state["parameters"], "accumulator": state["accumulator"], "batch": state["batch"]}
    parts |= {"frozen base": base} if base else {}
    padding = max(memory["accumulate"]["argument"] - sum(parts.values()), 0)
    own = {name: _own(m) for name, m in memory.items()}
    fullest = max(own, key=lambda name: own[name])
    code = sum(m["generated_code"] for m in memory.values())
    return (
        parts
        | {"padding to tiles": padding, "optimizer": optimizer}
        | ({"frozen model": frozen} if frozen else {})
        | {f"temporaries of {fullest}": own[fullest], "programs": code}
    )


def _own(memory: dict[str, int]) -> int:
    return memory["temp"] + max(memory["output"] - memory["alias"], 0)
