"""Model, lora, mesh, learner processes, packing, optimizer."""

import dataclasses
import math
from typing import Annotated, Literal

from bridge.text.thinking import is_marks
from configs.sections.base import (
    CheckedSection,
    Count,
    CountOrZero,
    Fraction,
    LocalPath,
    Positive,
    Range,
    WholeSeconds,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnerConfig(CheckedSection):
    """How many processes the learner is, and when one of them is taken to be lost. May differ when a run goes on."""

    num_processes: Count = 1
    """Learner processes that launch.local starts on this machine; each has all that `mesh.devices` gives it."""
    init_timeout_s: WholeSeconds = 300
    """How long the learner's processes wait for each other at the start."""
    peer_timeout_s: WholeSeconds = 60
    """Time without a sign of life after which a process of several is taken to be dead, in seconds: all end, and start
    again. Above the longest pause of a network or a host that is no failure."""
    gpu_memory_fraction: Fraction = 0.75
    """Share of each GPU's memory that the learner reserves at the start. On a GPU that an engine has too, it must leave
    room for `actor.gpu_memory_utilization`: at most 0.95 together. No effect on TPU and CPU."""


TARGETS = ("q", "k", "v", "o", "gate", "up", "down")
"""A layer's matrices, by their short names; `q` is `q_proj`."""
OF_MLP = ("gate", "up", "down")
MAX_RANK = 512
"""The largest that vLLM serves."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraConfig(CheckedSection):
    """Low-rank adapters (Hu et al., 2021): W + s B A is applied, and A [rank, in] and B [out, rank] alone are trained.

    The base W stays as it is in `model.path`; of the adapters alone there are gradients, optimizer state and
    checkpoints.
    """

    rank: Annotated[int, Range(0, MAX_RANK)] = 0
    """0: none, all parameters are trained."""
    alpha: Positive = 32.0
    """The scale: s = alpha / rank."""
    targets: str = "q,k,v,o,gate,up,down"
    """Which of each layer's matrices get one. A mixture of experts has q, k, v and o alone."""
    rank_stabilized: bool = False
    """S = alpha / sqrt(rank) instead (rsLoRA: Kalajdzievski, 2023), for large ranks."""

    def __post_init__(self) -> None:
        super().__post_init__()
        given = self.targets.split(",")
        if unknown := sorted(set(given) - set(TARGETS)):
            raise ValueError(f"lora.targets: no matrix {unknown[0]!r}, wanted some of {','.join(TARGETS)}")
        if len(set(given)) != len(given):
            raise ValueError(f"lora.targets names one twice: {self.targets!r}")
        if not self.is_on:
            self._check_says_nothing()

    def _check_says_nothing(self) -> None:
        """Refuses what only adapters read."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                raise ValueError(
                    f"lora.{field.name}={value} has no effect without lora.rank; give that, or leave it out"
                )

    @property
    def is_on(self) -> bool:
        """Whether adapters are what is trained."""
        return self.rank > 0

    @property
    def modules(self) -> tuple[str, ...]:
        """The matrices that get one, as the model names them, in its order: q_proj, ...; none where it is off."""
        given = self.targets.split(",") if self.is_on else []
        return tuple(f"{target}_proj" for target in TARGETS if target in given)

    @property
    def scale(self) -> float:
        """What B A is multiplied with."""
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig(CheckedSection):
    """The learner's device mesh; the product must be the number of devices."""

    devices: str = ""
    """CUDA_VISIBLE_DEVICES of a learner that launch.local starts. Empty: the first that actor.devices does not name, as
    many as the mesh has, where this machine has GPUs enough (`launch/supervision/placement.py`), else what launch.local
    sees."""
    data: Count = 1
    """Whole copies of the parameters."""
    fsdp: Count = 1
    """Splits parameters, optimizer state and the rows of a batch."""
    expert: Count = 1
    """The same, and the experts of a MoE model."""
    sequence: Count = 1
    """Splits the tokens of a row (context parallelism)."""
    tensor: Count = 1
    """Splits heads, MLP width and vocabulary."""

    @property
    def axes(self) -> dict[str, int]:
        """Sizes by the names of `learner.distributed.sharding.AXES`."""
        names = ("data", "fsdp", "expert", "sequence", "tensor")
        return {name: getattr(self, name) for name in names}

    @property
    def num_devices(self) -> int:
        """Of the whole mesh."""
        return math.prod(self.axes.values())

    @property
    def batch_shards(self) -> int:
        """Into how many parts the rows of a batch are split."""
        return self.data * self.fsdp * self.expert


Dtype = Literal["float32", "bfloat16"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(CheckedSection):
    """The policy: a Hugging Face folder, and the precisions it is held in."""

    path: LocalPath = ""
    """A Hugging Face folder (config.json, safetensors, tokenizer.json). Empty: the tiny recipe below,
    made once and cached."""
    param_dtype: Dtype = "float32"
    """Master weights. `bfloat16`: each update is rounded stochastically, so that it learns as in float32 does, with
    more noise; the optimizer's moments stay in float32 (optimizer.mu_dtype)."""
    compute_dtype: Dtype = "float32"
    """Matrix products in the learner."""
    served_dtype: Dtype = "float32"
    """What is published and what the engine computes in."""
    remat: Literal["auto", "full", "attention", "dots", "none"] = "auto"
    """What the backward pass recomputes: whole layers, all but attention (with the splash and xla implementations;
    cuDNN is recomputed), all but attention and the projections, nothing. auto: as little as the memory
    there is allows (`learner/update/auto_remat.py`); the log and loss.json say what that came to."""
    attention: Literal["auto", "splash", "cudnn", "xla"] = "auto"
    """Implementation in the learner: auto takes the platform's (`learner/model/attention/dispatch.py`)."""
    logit_chunk_tokens: CountOrZero = 0
    """Tokens a device whose logits exist at once; 0: 128 or 256 on a CPU, elsewhere what fits 512 MiB."""
    thinking_marks: str = "auto"
    """Marks around the model's thinking. Verifiers, environments and the judge read the answer outside them. A response
    that ends within its thinking has no answer. `auto`: the marks of published models, of the chat template and of the
    tokenizer. `off`: nothing is thinking. Any other value: both marks with `...` between, as `<reason>...</reason>`."""
    max_tokens: Count = 64
    """Longest prompt and response together; also the engine's context length."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_marks(self.thinking_marks):
            raise ValueError(
                f"model.thinking_marks: expected auto, off or OPENING...CLOSING, got {self.thinking_marks!r}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig(CheckedSection):
    """The optimizer, with global-norm clipping and linear warm-up."""

    name: Literal["adamw", "adafactor"] = "adamw"
    """adafactor keeps the second moment as rows and columns, and no first one (Shazeer and Stern, 2018)."""
    mu_dtype: Dtype = "float32"
    """What adamw keeps its first moment in."""
    learning_rate: Positive = 1e-6
    """The highest, after the warm-up."""
    warmup_steps: CountOrZero = 0
    """Optimizer steps, rounds.epochs of them an update."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """What follows the warm-up, over the run's optimizer steps: run.num_updates x rounds.epochs."""
    beta1: Annotated[float, Range(0, 1)] = 0.9
    beta2: Annotated[float, Range(0, 1)] = 0.95
    eps: Fraction = 1e-8
    weight_decay: Annotated[float, Range(0, 100)] = 0.0
    max_grad_norm: Positive = 1.0
    max_skipped_in_a_row: Count = 5
    """An optimizer step whose loss or gradient isn't finite changes nothing; after this many one after the other the
    run stops, at the end of the update."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1):
            raise ValueError(f"optimizer betas must be in [0, 1), got {self.beta1} and {self.beta2}")
        if self.name == "adafactor":
            for field in dataclasses.fields(self):
                value = getattr(self, field.name)
                if field.name in ("beta1", "beta2", "eps", "mu_dtype") and value != field.default:
                    raise ValueError(
                        f"optimizer.{field.name}={value} has no effect with optimizer.name=adafactor; leave it out"
                    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackingConfig(CheckedSection):
    """The shape of a training micro-batch: rows of packed sequences."""

    rows: Count = 4
    """Of a micro-batch, on all devices together."""
    row_tokens: Count = 256
    """Prompt and response tokens that a row holds."""
    auto: bool = False
    """Rows and tokens are chosen from the lengths of the first groups, and anew from eight updates at a time where that
    saves 3%, at most once in 50 updates; rows x row_tokens is then the most slots that a micro-batch may have."""
    max_row_sequences: Count = 128
    """Sequences in a row at most. The time and memory of cuDNN's attention grow with it: on GPUs not far above what
    rows hold (tests/bench/results/gpu.md)."""
    share_prompts: bool = False
    """A group's prompt is computed once for as many of its responses as fit a row, and not once for each: the same loss
    and gradient from fewer tokens, the fewer the shorter responses are beside their prompt. Wants attention that knows
    it, model.attention=xla, which is a CPU's, and a model without sliding windows."""
