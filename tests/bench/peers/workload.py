"""What every side of the learner bench trains on: a model folder and batches. numpy and safetensors only.

The model is a Qwen3 of 8 layers, width 256, 32768 words, tied: 16.3M parameters, float32. A batch is 16 sequences
in two groups of 8, each a quarter prompt (at most 128 tokens) and the rest response (at most 384), so that it fits
Tunix's [16, 128 + 384] as it ships. Lengths are lognormal; the three seeds fill 30% of that shape, `full` more
than 60%.
"""

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from safetensors.numpy import save_file

VOCAB_SIZE = 32768
PAD_ID, BOS_ID = 0, 1
MAX_PROMPT, MAX_RESPONSE = 128, 384
MAX_TOKENS = MAX_PROMPT + MAX_RESPONSE
GROUP_SIZE = 8
CLIP = 0.2
ADVANTAGE_EPS = 1e-6
LEARNING_RATE, BETA1, BETA2, ADAM_EPS = 1e-6, 0.9, 0.95, 1e-8
"""AdamW without weight decay."""

NUM_LAYERS, DIM, MLP_DIM, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 8, 256, 1024, 4, 2, 64
ROPE_THETA, RMS_EPS = 1e6, 1e-6

HF_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": DIM,
    "intermediate_size": MLP_DIM,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": NUM_HEADS,
    "num_key_value_heads": NUM_KV_HEADS,
    "head_dim": HEAD_DIM,
    "rms_norm_eps": RMS_EPS,
    "rope_theta": ROPE_THETA,
    "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "dtype": "float32",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lengths:
    """How a batch's sequence lengths are drawn: lognormal, clipped to 32..512 tokens."""

    seed: int
    median: float
    sigma: float
    row_tokens: int
    """T of the packed sides: the multiple of 512 with the fewest slots."""


BATCHES = {
    "seed0": Lengths(seed=0, median=150, sigma=0.7, row_tokens=512),
    "seed1": Lengths(seed=1, median=150, sigma=0.7, row_tokens=512),
    "seed2": Lengths(seed=2, median=150, sigma=0.7, row_tokens=512),
    "full": Lengths(seed=0, median=380, sigma=0.3, row_tokens=1024),
}
MAIN = ("seed0", "seed1", "seed2")
"""The aims are about the median of these."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """Sequences of one update; lists run over the N sequences, arrays inside over tokens."""

    prompts: list[np.ndarray]
    """int32, each starts with BOS."""
    responses: list[np.ndarray]
    behavior_logprobs: list[np.ndarray]
    """float32, of the responses, in nats."""
    rewards: np.ndarray
    """float64 [N]."""
    row_tokens: int

    @property
    def num_real_tokens(self) -> int:
        return sum(p.size + r.size for p, r in zip(self.prompts, self.responses, strict=True))

    @property
    def fill(self) -> float:
        """Real tokens over the slots of the padded shape."""
        return self.num_real_tokens / (len(self.prompts) * MAX_TOKENS)

    @property
    def advantages(self) -> np.ndarray:
        """(R - mean) / (std + eps) within each group, float32 [N] (GRPO)."""
        groups = self.rewards.reshape(-1, GROUP_SIZE)
        centred = groups - groups.mean(1, keepdims=True)
        return (centred / (groups.std(1, keepdims=True) + ADVANTAGE_EPS)).reshape(-1).astype(np.float32)


def make_batch(name: str) -> Batch:
    """The batch of that name; the same on every machine.

    The behaviour logprobs are a uniform policy's with noise, near what the fresh model says, so that ratios lie on
    both sides of the clipping bounds and a logprob at the wrong place shows.
    """
    lengths = BATCHES[name]
    rng = np.random.default_rng(lengths.seed)
    drawn = rng.lognormal(np.log(lengths.median), lengths.sigma, 2 * GROUP_SIZE)
    totals = np.clip(np.round(drawn), 32, MAX_TOKENS).astype(int)
    prompts, responses, behavior = [], [], []
    for total in totals:
        prompt_size = max(4, min(MAX_PROMPT, int(total / 4)))
        tokens = rng.integers(2, VOCAB_SIZE, total).astype(np.int32)
        tokens[0] = BOS_ID
        prompts.append(tokens[:prompt_size])
        responses.append(tokens[prompt_size:])
        noise = rng.normal(0, 0.1, total - prompt_size)
        behavior.append(np.minimum(noise - np.log(VOCAB_SIZE), 0).astype(np.float32))
    return Batch(
        prompts=prompts,
        responses=responses,
        behavior_logprobs=behavior,
        rewards=rng.normal(size=totals.size),
        row_tokens=lengths.row_tokens,
    )


class Padded(NamedTuple):
    """One sequence a row: prompts padded on the left to P, responses on the right to C."""

    prompts: np.ndarray
    """int32 [N, P]."""
    responses: np.ndarray
    """int32 [N, C]."""
    behavior_logprobs: np.ndarray
    """float32 [N, C]."""
    advantages: np.ndarray
    """float32 [N]."""


def padded(batch: Batch) -> Padded:
    """The batch at [N, 128] and [N, 384]."""
    num = len(batch.prompts)
    prompts = np.full((num, MAX_PROMPT), PAD_ID, np.int32)
    responses = np.full((num, MAX_RESPONSE), PAD_ID, np.int32)
    behavior = np.zeros((num, MAX_RESPONSE), np.float32)
    for i, (prompt, response) in enumerate(zip(batch.prompts, batch.responses, strict=True)):
        prompts[i, MAX_PROMPT - prompt.size :] = prompt
        responses[i, : response.size] = response
        behavior[i, : response.size] = batch.behavior_logprobs[i]
    return Padded(prompts, responses, behavior, batch.advantages)


class Packed(NamedTuple):
    """Whole sequences in rows of T tokens; every array is [rows, T] and belongs to the token at its place."""

    tokens: np.ndarray
    positions: np.ndarray
    segment_ids: np.ndarray
    """1, 2, ... along a row; 0 is padding."""
    is_response: np.ndarray
    behavior_logprobs: np.ndarray
    advantages: np.ndarray


def packed(batch: Batch) -> Packed:
    """The batch packed into as few rows of `row_tokens` as first-fit-decreasing needs."""
    sizes = [p.size + r.size for p, r in zip(batch.prompts, batch.responses, strict=True)]
    rows = fit(sizes, batch.row_tokens)
    shape = (len(rows), batch.row_tokens)
    out = Packed(
        tokens=np.full(shape, PAD_ID, np.int32),
        positions=np.zeros(shape, np.int32),
        segment_ids=np.zeros(shape, np.int32),
        is_response=np.zeros(shape, np.bool_),
        behavior_logprobs=np.zeros(shape, np.float32),
        advantages=np.zeros(shape, np.float32),
    )
    advantages = batch.advantages
    for b, row in enumerate(rows):
        start = 0
        for segment, i in enumerate(row, 1):
            middle, end = start + batch.prompts[i].size, start + sizes[i]
            out.tokens[b, start:middle], out.tokens[b, middle:end] = batch.prompts[i], batch.responses[i]
            out.positions[b, start:end] = np.arange(sizes[i])
            out.segment_ids[b, start:end] = segment
            out.is_response[b, middle:end] = True
            out.behavior_logprobs[b, middle:end] = batch.behavior_logprobs[i]
            out.advantages[b, middle:end] = advantages[i]
            start = end
    return out


def fit(sizes: Sequence[int], row_tokens: int) -> list[list[int]]:
    """First-fit-decreasing: the indices in each row."""
    rows: list[list[int]] = []
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        for row in rows:
            if sum(sizes[j] for j in row) + sizes[i] <= row_tokens:
                row.append(i)
                break
        else:
            rows.append([i])
    return rows


def write_model(folder: pathlib.Path, seed: int = 0) -> int:
    """Writes config.json and model.safetensors; returns the number of parameters.

    Matrices are N(0, 0.02), norms 1 + N(0, 0.1): a norm that a side loads wrongly or forgets shows in the numbers.
    """
    rng = np.random.default_rng(seed)
    q_dim, kv_dim = NUM_HEADS * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (VOCAB_SIZE, DIM), "model.norm": (DIM,)}
    for i in range(NUM_LAYERS):
        layer = {
            "input_layernorm": (DIM,),
            "self_attn.q_proj": (q_dim, DIM),
            "self_attn.k_proj": (kv_dim, DIM),
            "self_attn.v_proj": (kv_dim, DIM),
            "self_attn.q_norm": (HEAD_DIM,),
            "self_attn.k_norm": (HEAD_DIM,),
            "self_attn.o_proj": (DIM, q_dim),
            "post_attention_layernorm": (DIM,),
            "mlp.gate_proj": (MLP_DIM, DIM),
            "mlp.up_proj": (MLP_DIM, DIM),
            "mlp.down_proj": (DIM, MLP_DIM),
        }
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    tensors = {
        f"{name}.weight": (rng.normal(0, 0.02, shape) if len(shape) == 2 else rng.normal(1, 0.1, shape)).astype("f4")
        for name, shape in shapes.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(HF_CONFIG, indent=2))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return sum(t.size for t in tensors.values())
