"""From a compiled program's counts to seconds, MFU and room in memory. Pure arithmetic.

What a chip is busy with, one thing after the other:

    busy = cycles of XLA's fusions / clock + FLOPs of Pallas kernels / (kernel_efficiency x peak)
    step = max(busy, collectives that run beside it) + collectives that block

XLA states the cycles of each fusion (compute and HBM traffic), but nothing of a kernel and nothing of a collective:
a kernel is taken at a stated share of the peak (`TpuChip.kernel_efficiency`), a collective at what its links carry.
"""

import dataclasses
import math
import re
from typing import Any

from configs.schema import Config
from learner.costs import flops
from learner.costs.flops import TpuChip
from learner.model.config import Architecture

_ATTENTION_MATMULS = {"fwd": 2, "dq": 3, "dkv": 4, "dkv_fused": 5}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramTime:
    """Where a program's time goes on one chip, in seconds, and the roofline's three bounds."""

    fusions_s: float
    kernels_s: float
    blocking_s: float
    """Collectives that nothing else runs beside."""
    overlapped_s: float
    """Collectives that other work is scheduled beside."""
    matmul_bound_s: float
    hbm_bound_s: float
    ici_bound_s: float
    hardware_flops: float
    """Of dots, convolutions and kernels."""
    unknown_kernels: tuple[str, ...]

    @property
    def step_s(self) -> float:
        """The estimate; see the module."""
        return max(self.fusions_s + self.kernels_s, self.overlapped_s) + self.blocking_s

    @property
    def roofline_s(self) -> float:
        """No run of this program can be faster: FLOPs at the peak, bytes at HBM's rate, or sends at the links'."""
        return max(self.matmul_bound_s, self.hbm_bound_s, self.ici_bound_s)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """An update on a slice."""

    hbm_bytes: dict[str, int]
    """What a chip holds at the fullest moment, by what it is; the sum decides whether it fits."""
    programs: dict[str, ProgramTime]
    num_micro_batches: int
    num_epochs: int
    """Passes over the update's batch."""
    model_flops: float
    """Of an update, all chips."""
    model_flops_all_pairs: float
    """The same with attention counted without its causal mask and the head at every token."""
    num_chips: int
    chip: TpuChip

    @property
    def total_hbm_bytes(self) -> int:
        """What a chip must have."""
        return sum(self.hbm_bytes.values())

    @property
    def fits(self) -> bool:
        """Whether it has it."""
        return self.total_hbm_bytes <= self.chip.hbm_bytes

    @property
    def update_s(self) -> float:
        """In each pass the micro-batches (scored in the first, where the loss needs it), then the optimizer."""
        return sum(self._num_runs(name) * p.step_s for name, p in self.programs.items())

    @property
    def implied_mfu(self) -> float:
        """Model FLOPs / (estimated seconds x chips x peak)."""
        return self.model_flops / (self.update_s * self.num_chips * self.chip.flops_per_s)

    def mfu_with_kernels_at(self, share: float) -> float:
        """The implied MFU if Pallas kernels ran at this share of the speed assumed."""
        slower = {n: dataclasses.replace(p, kernels_s=p.kernels_s / share) for n, p in self.programs.items()}
        return dataclasses.replace(self, programs=slower).implied_mfu

    @property
    def roofline_mfu(self) -> float:
        """The same with the roofline's seconds: a ceiling."""
        seconds = sum(self._num_runs(name) * p.roofline_s for name, p in self.programs.items())
        return self.model_flops / (seconds * self.num_chips * self.chip.flops_per_s)

    @property
    def hfu(self) -> float:
        """Hardware FLOPs (recomputed ones too) / (estimated seconds x peak)."""
        computed = sum(self._num_runs(n) * p.hardware_flops for n, p in self.programs.items() if n != "apply")
        return computed / (self.update_s * self.chip.flops_per_s)

    def _num_runs(self, program: str) -> int:
        """Of a program in an update."""
        passes = 1 if program == "score" else self.num_epochs
        return passes * (1 if program == "apply" else self.num_micro_batches)


def estimate(answer: dict[str, Any], config: Config, model: Architecture, chip: TpuChip) -> Estimate:
    """Puts a worker's answer (`launch.compile_tpu.worker`) into seconds."""
    tokens, scored, squares = micro_batch_lengths(config)
    n, epochs = num_micro_batches(config), config.rounds.epochs
    trained = n * epochs
    work: dict[str, Any] = dict(
        num_tokens=trained * tokens,
        sum_squared_lengths=trained * squares,
        num_adapter_params=flops.adapter_params(model, config.lora),
    )
    return Estimate(
        hbm_bytes=hbm_bytes(answer),
        programs={name: program_time(p, chip) for name, p in answer["programs"].items()},
        num_micro_batches=n,
        num_epochs=epochs,
        model_flops=flops.model_flops(model, **work, num_scored_tokens=trained * scored),
        model_flops_all_pairs=flops.model_flops(model, **work, num_scored_tokens=trained * tokens, causal=False),
        num_chips=answer["num_chips"],
        chip=chip,
    )


def micro_batch_lengths(config: Config) -> tuple[int, int, int]:
    """Tokens, scored tokens and the sum of squared lengths of a micro-batch full of the longest sequences."""
    longest = config.model.max_tokens
    num_sequences = config.packing.rows * (config.packing.row_tokens // longest)
    return num_sequences * longest, num_sequences * config.sampling.max_response_tokens, num_sequences * longest**2


def num_micro_batches(config: Config) -> int:
    """Micro-batches an update takes when every sequence is as long as it may be."""
    sequences = config.rounds.groups_per_update * config.rounds.samples_per_group
    a_batch = config.packing.rows * (config.packing.row_tokens // config.model.max_tokens)
    return math.ceil(sequences / a_batch)


def hbm_bytes(answer: dict[str, Any]) -> dict[str, int]:
    """What a chip holds at the fullest moment.

    The optimizer's state is no argument of `accumulate`, so the compiler doesn't see it there, but it stays where it
    is: its size (padding included) is what `apply` takes more. A frozen model that scores stays as well, and so does
    the base of adapters, which `accumulate` has as an argument and `apply` has not; as a reference it is no second one.
    """
    state, programs = answer["state_bytes"], answer["programs"]
    memory = {name: p["memory"] for name, p in programs.items()}
    optimizer, base = state["optimizer"], state.get("base", 0)
    if "apply" in memory:
        optimizer = max(
            memory["apply"]["argument"] - memory["accumulate"]["argument"] + base + state["batch"], optimizer
        )
    frozen = max(memory["score"]["argument"] - base - state["batch"], 0) if "score" in memory else 0
    frozen += state.get("reference", 0)
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
    """Bytes that a program needs beside its arguments."""
    return memory["temp"] + max(memory["output"] - memory["alias"], 0)


def program_time(program: dict[str, Any], chip: TpuChip) -> ProgramTime:
    """One program on one chip."""
    clock = chip.flops_per_s / chip.flops_per_cycle
    kernels = [(k["name"], k["runs"], kernel_flops(k["name"], k["operands"], k["results"])) for k in program["kernels"]]
    in_kernels = sum(runs * (value or 0.0) for _, runs, value in kernels)
    blocking = sum(c["seconds"] for c in program["collectives"] if not c["is_async"])
    overlapped = sum(c["seconds"] for c in program["collectives"] if c["is_async"])
    total = program["matmul_flops"] + in_kernels
    return ProgramTime(
        fusions_s=program["estimated_cycles"] / clock,
        kernels_s=in_kernels / (chip.kernel_efficiency * chip.flops_per_s),
        blocking_s=blocking,
        overlapped_s=overlapped,
        matmul_bound_s=total / chip.flops_per_s,
        hbm_bound_s=program["hbm_bytes"] / chip.hbm_bytes_per_s,
        ici_bound_s=blocking + overlapped,
        hardware_flops=total,
        unknown_kernels=tuple(sorted({name for name, _, value in kernels if value is None})),
    )


def kernel_flops(name: str, operands: list[list[int]], results: list[list[int]]) -> float | None:
    """FLOPs of one run of a kernel that we use, None of any other.

    Splash attention skips the blocks above the diagonal: of n queries and m keys n (m - n / 2) pairs are left on the
    chip with a row's last queries, which is half of them where it has all, and the slowest chip where `sequence` splits
    a row. Forward has 2 matmuls, the backward for the queries 3, for keys and values 4 (5 where it makes the queries'
    gradient too). A grouped matmul takes each row through one group's matrix, whether it makes rows or, contracting
    them, the groups' matrices.
    """
    attention = re.match(r"splash_m[hq]a_(fwd|dq|dkv)", name)
    if attention:
        q, k = [shape for shape in operands if len(shape) >= 3 and shape[-1] >= 32 and shape[-2] >= 128][:2]
        kind = attention.group(1)
        if kind == "dkv" and sum(list(q) == list(shape)[-len(q) :] for shape in results) > 2:
            kind = "dkv_fused"
        return _ATTENTION_MATMULS[kind] * 2.0 * math.prod(q) * (k[-2] - q[-2] / 2)
    if re.match(r"t?gmm|ragged-dot-none", name):
        rows = next(shape for shape in operands if len(shape) == 2)
        return 2.0 * math.prod(rows) * results[0][-1]
    return 0.0 if name == "ragged-dot-metadata" else None
