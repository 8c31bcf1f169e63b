"""What the planner is told of RollPacker's and RolloutPipe's experiments: none of the results it is to predict.

Each number is a paper's, with its section or table, or follows from a principle that is said beside it. None may be
changed after a comparison; `results/papers.md` says what the planner then gets wrong, and which results were known.
"""

import dataclasses
import statistics
from collections.abc import Mapping

# RollPacker.

HBM_BYTES_PER_S, FLOPS, HBM_BYTES = 3.35e12, 989e12, 80e9
"""H800 (section 6): its data sheet's memory bandwidth, dense bfloat16 rate and memory."""
P0, R0, ETA = 128, 8, 1.25
"""Sections 6 and 6.3."""
PROMPT_TOKENS = 300
"""Not given; the order of magnitude of a question. It enters into prefill and the size of the cache only."""
ROLLOUT_SHARE, REWARD_SHARE, TRAINING_SHARE = (
    statistics.fmean(column) / 100 for column in ((72, 66, 71), (5, 13, 7), (23, 21, 22))
)
"""Of a synchronous step at 14B/16k (Table 1), the mean of the three tasks, which are mixed evenly (section 6). The
other sizes' follow: a step's reward takes as many seconds as there, since there are as many samples of the same data,
and a trained token costs one GPU time in proportion to the parameters."""
ASYNC_REWARD_S = 2.0
"""What is left after the last response when each is judged as it ends: T_min of a sandbox and the limit of a
mathematical evaluation (sections 4.3, 5)."""
MIGRATION_S = 3.0
"""Until GPUs that are given up train: "the migration overhead does not exceed 3 seconds" (section 6.6)."""
GPU_MEMORY_UTILIZATION = 0.9
"""Not given; vLLM's default."""
MAX_NUM_SEQS = 256
"""Not given; vLLM's default. No engine has as many requests."""
PROMPT_SHARES = (0.8, 0.5, 0.2)
"""Of the lengths' spread, what is the prompt's; not given. The first is the profile's default and the central one
("a small subset of prompts", section 1)."""
NUM_ROUNDS, SEEDS = 20, (0, 1, 2)
"""Four periods of four short rounds and a long one (Figure 4)."""
FIGURE_11_ETAS = (1.125, 1.25, 1.375, 1.5)
"""Between and at the ends of its range (section 6.3); the model is not named where the setting is, so 14B/16k, which
section 3 is about."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """A model of section 6 on its GPUs."""

    name: str
    params: float
    """Qwen2.5's model cards, as are the three next."""
    num_layers: int
    num_kv_heads: int
    head_dim: int
    max_tokens: int
    num_gpus: int
    tensor_parallel_size: int
    """Of the rollout (section 6)."""

    @property
    def num_engines(self) -> int:
        """All GPUs generate (the systems compared are colocated, section 2.1)."""
        return self.num_gpus // self.tensor_parallel_size

    @property
    def kv_bytes(self) -> int:
        """Of a token's keys and values, bfloat16."""
        return 2 * 2 * self.num_layers * self.num_kv_heads * self.head_dim

    @property
    def kv_capacity_tokens(self) -> int:
        """Of an engine: what its GPUs' memory has beside the weights."""
        memory = GPU_MEMORY_UTILIZATION * HBM_BYTES * self.tensor_parallel_size
        return int((memory - 2 * self.params) / self.kv_bytes)

    def step_s(self, running: float, context_tokens: float) -> float:
        """A decoding step as a roofline: it reads the weights and all caches once, and nothing else takes time.

        No utilisation is chosen: reward and training are told as shares of the step, so what scales everything cancels.
        """
        read = 2 * self.params + running * context_tokens * self.kv_bytes
        return read / (self.tensor_parallel_size * HBM_BYTES_PER_S)

    @property
    def prefill_s_per_token(self) -> float:
        """Two operations a parameter, at the full rate."""
        return 2 * self.params / (self.tensor_parallel_size * FLOPS)


SETTINGS = (
    Setting(
        name="7B/8k",
        params=7.62e9,
        num_layers=28,
        num_kv_heads=4,
        head_dim=128,
        max_tokens=8192,
        num_gpus=16,
        tensor_parallel_size=1,
    ),
    Setting(
        name="14B/16k",
        params=14.77e9,
        num_layers=48,
        num_kv_heads=8,
        head_dim=128,
        max_tokens=16384,
        num_gpus=32,
        tensor_parallel_size=2,
    ),
    Setting(
        name="32B/32k",
        params=32.76e9,
        num_layers=64,
        num_kv_heads=8,
        head_dim=128,
        max_tokens=32768,
        num_gpus=64,
        tensor_parallel_size=2,
    ),
)
CALIBRATED = "14B/16k"
"""The setting of Table 1."""

# RolloutPipe.

K, U = 8, 2
"""Section 5.1; F_w = U."""
COMPUTE_S: Mapping[str, Mapping[int, float]] = {
    "LSAT-AR": {32: 195.1, 64: 388.9, 96: 587.4},
    "Sci-XW": {32: 191.8, 64: 379.9, 96: 572.2},
    "Sci-JL": {32: 194.1, 64: 384.6, 96: 584.5},
    "OlyPhys": {32: 211.5, 64: 420.7, 96: 640.0},
}
"""Trainer compute of Slime (Table 1), by workload and R."""
SERIAL_ROLLOUT_96_S = statistics.fmean((509, 543))
"""Slime's first dispatch at R = 96 is 509 to 543 s over the workloads (section 5.2), and its rollout ends with it; no
workload is named, so each has the middle."""
SERIAL_WAITING_RATIO_32 = statistics.fmean((0.47, 0.52))
"""Slime's waiting ratio is 47 to 52 % (section 5.3), of no named setting: the middle. The rollout at R = 32 then takes
compute x w / (1 - w); at R = 64 nothing is given and nothing is fitted."""
MEAN_TOKENS, SIGMA = 3450.0, 0.5
"""Responses are 3.3k to 3.6k tokens long (Figure 5); how they spread is not given: a lognormal's moderate sigma."""
SIGMAS = (0.5, 0.3, 0.8)
"""How much that matters is shown."""
ROLLOUT_PARAMS, ROLLOUT_KV_BYTES = 1.72e9, 2 * 2 * 28 * 8 * 128
"""Qwen3-1.7B's model card."""
ROLLOUT_BYTES, MEM_FRACTION = 2 * 40e9, 0.88
"""Two A100 of 40 GB with TP = 2 (section 5.1); SGLang's default share for weights and cache."""
ROLLOUT_BYTES_PER_S = 2 * 1.555e12
"""Their data sheet's memory bandwidth; of the second engine alone, which was chosen in sight."""
PLACES = int((MEM_FRACTION * ROLLOUT_BYTES - 2 * ROLLOUT_PARAMS) / ROLLOUT_KV_BYTES / MEAN_TOKENS)
"""Responses whose cache fits at once, which is what bounds them: SGLang admits by memory.

An engine's step takes a + b h seconds with h running (weights and kernels, and each sequence's cache). Both are fitted
to serial's rollouts at R = 32 and 96, and to nothing of CGP or FGD.
"""
ROUNDS = 4
"""Section 5.1."""
