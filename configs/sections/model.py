"""Config sections of the learner: model, LoRA, mesh, processes, gradient helpers, packing and optimizer."""

import dataclasses
import math
from typing import Annotated, Literal

from bridge.text.thinking import is_marks
from configs.sections.base import (
    CheckedSection,
    Count,
    CountOrZero,
    Fraction,
    FractionOrZero,
    LocalPath,
    Positive,
    Range,
    check_unread,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnerConfig(CheckedSection):
    """Learner processes. These fields may change when a run is resumed."""

    num_processes: Count = 1
    """Learner processes that launch.local starts on this machine. Each process sees all devices of `mesh.devices`."""
    gpu_memory_fraction: Fraction = 0.75
    """Fraction of each GPU's memory that the learner reserves at startup. On a GPU shared with an engine, the sum with
    `actor.gpu_memory_utilization` must be at most 0.95. No effect on TPU and CPU."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HelpersConfig(CheckedSection):
    """Gradient helper: a process that trains on engines' devices while a round's last responses run.

    The engines hand their requests over to the others, and serve again after the round (RollPacker section 4.4). A
    helper that does not answer for supervision.engine_timeout_s is killed, and the learner trains its micro-batches.
    """

    num_engines: CountOrZero = 0
    """Engines of launch.local whose devices the helper takes, the last ones; RollPacker takes half. 0: no helper."""
    release_at: FractionOrZero = 0.0
    """Fraction of a round's complete groups at which the engines give their devices up. 0: decide at every 5% from 20%
    to 50%. The other engines' KV cache must then hold the running requests (RollPacker Algorithm 1), and the round must
    be expected to end sooner by the help."""


TARGETS = ("q", "k", "v", "o", "gate", "up", "down")
"""Short names of the matrices in a layer; `q` is `q_proj`."""
OF_MLP = ("gate", "up", "down")
MAX_RANK = 512
"""Largest rank that vLLM serves."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraConfig(CheckedSection):
    """Low-rank adapters (Hu et al., 2021): W + s B A, with trained A [rank, in] and B [out, rank].

    The base W stays as in `model.path`. Gradients, optimizer state and checkpoints cover the adapters only.
    """

    rank: Annotated[int, Range(0, MAX_RANK)] = 0
    """Rank of the adapters. 0: no adapters; all parameters are trained."""
    alpha: Positive = 32.0
    """Scale numerator of the adapters: s = alpha / rank."""
    targets: str = "q,k,v,o,gate,up,down"
    """Comma-separated matrices with adapters, per layer. Mixture-of-experts models support q, k, v and o only."""
    rank_stabilized: bool = False
    """True if the scale is s = alpha / sqrt(rank), for large ranks (rsLoRA: Kalajdzievski, 2023)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        given = self.targets.split(",")
        if unknown := sorted(set(given) - set(TARGETS)):
            raise ValueError(f"lora.targets: expected some of {','.join(TARGETS)}, got {unknown[0]!r}")
        if len(set(given)) != len(given):
            raise ValueError(f"lora.targets: expected distinct matrices, got {self.targets!r}")
        if not self.is_on:
            check_unread("lora", self, "without lora.rank; set lora.rank, or leave it out")

    @property
    def is_on(self) -> bool:
        """True if the run trains adapters."""
        return self.rank > 0

    @property
    def modules(self) -> tuple[str, ...]:
        """Model names of the matrices with adapters, in model order (q_proj, ...). Empty if LoRA is off."""
        given = self.targets.split(",") if self.is_on else []
        return tuple(f"{target}_proj" for target in TARGETS if target in given)

    @property
    def scale(self) -> float:
        """Scale s of B A."""
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig(CheckedSection):
    """Device mesh of the learner. The product of the axis sizes must equal the number of devices."""

    devices: str = ""
    """CUDA_VISIBLE_DEVICES of the learner, if launch.local starts it. Empty: the first GPUs that actor.devices does not
    use, one per mesh device (`launch/supervision/placement.py`). On a machine with too few GPUs: all devices visible to
    launch.local."""
    data: Count = 1
    """Size of the data axis: number of full copies of the parameters."""
    fsdp: Count = 1
    """Size of the fsdp axis, which splits parameters, optimizer state and the rows of a batch."""
    expert: Count = 1
    """Size of the expert axis, which splits the experts of a MoE model. It also splits parameters, optimizer state and
    the rows of a batch."""
    sequence: Count = 1
    """Size of the sequence axis, which splits the tokens of a row (context parallelism)."""
    tensor: Count = 1
    """Size of the tensor axis, which splits heads, MLP width and vocabulary."""

    @property
    def axes(self) -> dict[str, int]:
        """Axis sizes by the names of `learner.distributed.sharding.AXES`."""
        names = ("data", "fsdp", "expert", "sequence", "tensor")
        return {name: getattr(self, name) for name in names}

    @property
    def num_devices(self) -> int:
        """Number of devices in the mesh."""
        return math.prod(self.axes.values())

    @property
    def batch_shards(self) -> int:
        """Number of parts that the rows of a batch are split into."""
        return self.data * self.fsdp * self.expert


Dtype = Literal["float32", "bfloat16"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(CheckedSection):
    """Policy: a Hugging Face folder, its precisions and its context length."""

    path: LocalPath = ""
    """Hugging Face folder (config.json, safetensors, tokenizer.json). Empty: the quickstart model of `TinyModelRecipe`,
    created once and cached."""
    param_dtype: Dtype = "float32"
    """Dtype of the master weights. `float32`: exact updates. `bfloat16`: stochastic rounding of each update, which
    learns like float32 with more noise. optimizer.mu_dtype and optimizer.nu_dtype set the moments' dtypes."""
    compute_dtype: Dtype = "float32"
    """Dtype of matrix products in the learner. `float32`: full precision. `bfloat16`: mixed precision with the master
    weights in param_dtype."""
    served_dtype: Dtype = "float32"
    """Dtype of published weights and of the engine. `float32`: full precision. `bfloat16`: half the transfer size and
    engine memory for weights."""
    routing_replay: bool = False
    """True if the learner routes each token of a mixture-of-experts model to the experts that the engine chose (R3: Ma
    et al., 2025). False: the learner's own router chooses. Requires actor.prefix_caching. Costs layers * experts per
    token bytes per token of a group, twice that with over 256 experts."""
    remat: Literal["auto", "full", "attention", "gate", "dots", "none"] = "auto"
    """Activations that the backward pass recomputes. `full`: whole layers. `attention`: all but attention (splash and
    xla; cuDNN attention is recomputed). `gate`: the MLP's gate projection and elementwise operations. `dots`:
    elementwise operations. `none`: nothing. `auto`: as little as memory allows (`learner/update/auto_remat.py`),
    reported in the log and loss.json."""
    attention: Literal["auto", "splash", "cudnn", "xla"] = "auto"
    """Attention implementation of the learner. `splash`: TPU. `cudnn`: NVIDIA Hopper or newer, in bfloat16. `xla`: any
    device. `auto`: the first of these that supports the platform (`learner/model/attention/dispatch.py`)."""
    logit_chunk_tokens: CountOrZero = 0
    """Tokens per device whose logits are in memory together. 0: 128 or 256 on a CPU, and as many as fit 512 MiB
    elsewhere."""
    thinking_marks: str = "auto"
    """Marks around the model's thinking. Verifiers, environments and the judge read the answer outside them. A response
    that ends within its thinking has no answer. `auto`: marks of published models, the chat template and the tokenizer.
    `off`: no thinking. Otherwise: both marks with `...` between them, for example `<reason>...</reason>`."""
    max_tokens: Count = 64
    """Largest number of tokens per sequence, prompt and response together. It is also the engine's context length."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_marks(self.thinking_marks):
            raise ValueError(
                f"model.thinking_marks: expected auto, off or OPENING...CLOSING, got {self.thinking_marks!r}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerKind:
    """Construction, state and config fields of an optimizer."""

    transform: str
    """`module:function` that returns the optax transformation of clipped gradients from an `OptimizerConfig` and a mesh
    (None for one device). The learning rate and the weight decay follow it."""
    matrix_moments: tuple[str, ...] = ()
    """Fields with the dtypes of the moments of each matrix of a layer, which are of the matrix's size."""
    other_moments: tuple[str, ...] = ()
    """Fields with the dtypes of the moments of each other parameter."""
    constants: tuple[str, ...] = ()
    """Fields of its constants."""

    @property
    def fields(self) -> set[str]:
        """Config fields that it reads and another optimizer may not."""
        return {*self.matrix_moments, *self.other_moments, *self.constants}


OPTIMIZERS: dict[str, OptimizerKind] = {
    "adamw": OptimizerKind(
        transform="learner.update.optimizer:scale_by_adam",
        matrix_moments=("mu_dtype", "nu_dtype"),
        other_moments=("mu_dtype", "nu_dtype"),
        constants=("beta1", "beta2", "eps"),
    ),
    "adafactor": OptimizerKind(transform="learner.update.optimizer:scale_by_adafactor"),
    "muon": OptimizerKind(
        transform="learner.update.muon:scale_by_muon",
        matrix_moments=("mu_dtype",),
        other_moments=("mu_dtype", "nu_dtype"),
        constants=("momentum", "beta1", "beta2", "eps"),
    ),
}
"""Optimizer by `optimizer.name`. Factored moments are negligible and have no entry."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig(CheckedSection):
    """Optimizer with global-norm clipping and linear warm-up."""

    name: str = "adamw"
    """Optimizer, one of `OPTIMIZERS`. `adamw`: AdamW. `adafactor`: factored second moment and no first moment (Shazeer
    and Stern, 2018). `muon`: orthogonalized momentum for matrices of layers (Jordan et al., 2024), AdamW for other
    parameters, at one learning rate."""
    mu_dtype: Dtype = "float32"
    """Dtype of the first moment of adamw and of the momentum of muon. `float32`: full precision. `bfloat16`: half the
    memory, with stochastic rounding."""
    nu_dtype: Dtype = "float32"
    """Dtype of the second moment of adamw. `float32`: full precision. `bfloat16`: half the memory, with stochastic
    rounding."""
    learning_rate: Positive = 1e-6
    """Peak learning rate, reached after warm-up."""
    warmup_steps: CountOrZero = 0
    """Length of the linear warm-up, in optimizer steps (rounds.epochs steps per update). 0: no warm-up."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Learning rate schedule after warm-up, over the run's run.num_updates x rounds.epochs optimizer steps. `constant`:
    stays at the peak. `cosine`: cosine decay to 0. `linear`: linear decay to 0."""
    momentum: Annotated[float, Range(0, 1)] = 0.95
    """Decay rate of the Nesterov momentum of muon."""
    beta1: Annotated[float, Range(0, 1)] = 0.9
    """Decay rate of the first moment of adamw."""
    beta2: Annotated[float, Range(0, 1)] = 0.95
    """Decay rate of the second moment of adamw."""
    eps: Fraction = 1e-8
    """Constant added to the denominator of adamw and to the norm that muon divides by."""
    weight_decay: Annotated[float, Range(0, 100)] = 0.0
    """Decoupled weight decay coefficient. 0: no weight decay."""
    max_grad_norm: Positive = 1.0
    """Global gradient norm above which gradients are scaled down to it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.name not in OPTIMIZERS:
            raise ValueError(f"optimizer.name: expected one of {', '.join(OPTIMIZERS)}, got {self.name!r}")
        for field in ("momentum", "beta1", "beta2"):
            if not 0 <= getattr(self, field) < 1:
                raise ValueError(f"optimizer.{field} must be in [0, 1), got {getattr(self, field)}")
        ignored = set[str]().union(*(kind.fields for kind in OPTIMIZERS.values())) - OPTIMIZERS[self.name].fields
        check_unread("optimizer", self, f"with optimizer.name={self.name}; leave it out", ignored)

    def state_bytes(self, *, num_matrix: int, num_other: int) -> int:
        """Returns the bytes of the state for these numbers of parameters in matrices of layers and in other arrays."""
        kind = OPTIMIZERS[self.name]

        def per_param(moments: tuple[str, ...]) -> int:
            return sum(4 if getattr(self, field) == "float32" else 2 for field in moments)

        return num_matrix * per_param(kind.matrix_moments) + num_other * per_param(kind.other_moments)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackingConfig(CheckedSection):
    """Shape of a training micro-batch: rows of packed sequences."""

    rows: Count = 4
    """Rows per micro-batch, summed over all devices."""
    row_tokens: Count = 256
    """Prompt and response tokens per row."""
    auto: bool = False
    """True if rows and tokens per row are chosen from the lengths of the first groups. They are chosen again from eight
    updates of lengths if that saves 3%, at most once per 50 updates. rows x row_tokens is the upper limit of slots per
    micro-batch."""
    max_row_sequences: Count = 128
    """Largest number of sequences per row. Time and memory of cuDNN attention grow with it. On GPUs, set it slightly
    above the actual number (tests/bench/results/gpu.md)."""
    whole_groups: bool = False
    """True if all responses of a group are in one micro-batch, as loss.correction.veto=group requires. Micro-batches
    are then less full. False: a group may span micro-batches."""
    share_prompts: bool = False
    """True if the prompt of a group is computed once per row instead of once per response. Loss and gradient stay the
    same with fewer tokens. Requires model.attention=xla and a model without sliding windows. False: once per
    response."""

    def check_whole_groups(self, *, veto: str, group_size: int, max_tokens: int) -> None:
        """Raises ValueError if groups may be split although they must not be, or may not fit a micro-batch."""
        if not self.whole_groups:
            if veto == "group":
                raise ValueError(
                    "loss.correction.veto=group requires packing.whole_groups=True: a group is rejected in the "
                    "micro-batch that holds all its responses. Set it, or loss.correction.veto=sequence"
                )
            return
        if self.auto:
            raise ValueError("packing.whole_groups requires packing.auto=False: a smaller shape may not hold a group")
        per_row = max(1, min(self.row_tokens // max_tokens, self.max_row_sequences - self.share_prompts))
        if self.rows * per_row < group_size:
            raise ValueError(
                f"packing.whole_groups: expected room for {group_size} sequences (rounds.samples_per_group) of "
                f"{max_tokens} tokens (model.max_tokens) in a micro-batch, got {self.rows * per_row}. Raise "
                "packing.rows or packing.row_tokens"
            )
