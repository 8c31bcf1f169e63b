"""The batches that every side of the learner bench trains on. numpy only.

A batch of the small model (`models.py`) is 16 sequences in two groups of 8, each a quarter prompt (at most 128 tokens)
and the rest response (at most 384), so that it fits Tunix's [16, 128 + 384] as it ships. Lengths are lognormal; the
three seeds fill 30% of that shape, `full` more than 60%. `real` is SmolLM2's: an update of a task of short answers, 32
sequences in four groups, 71 tokens each, of which the last 24 are scored; the eight of a group answer one prompt, as
samples of a policy do. `real_apart` is the same of 32 prompts.
"""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tests.bench.peers.models import MODELS, SMALL, SMOLLM2

PAD_ID, BOS_ID = 0, 1
MAX_PROMPT, MAX_RESPONSE = 128, 384
MAX_TOKENS = MAX_PROMPT + MAX_RESPONSE
GROUP_SIZE = 8
CLIP = 0.2
ADVANTAGE_EPS = 1e-6
LEARNING_RATE, BETA1, BETA2, ADAM_EPS = 1e-6, 0.9, 0.95, 1e-8
"""AdamW without weight decay."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lengths:
    """How a batch's sequence lengths are drawn: lognormal, clipped to 32..512 tokens."""

    seed: int
    median: float
    sigma: float
    row_tokens: int
    """T of the packed sides: the multiple of 512 with the fewest slots; of equal lengths one sequence a row."""
    num_sequences: int = 2 * GROUP_SIZE
    response_tokens: int | None = None
    """Of each sequence; None: what a quarter, the prompt, leaves."""
    is_one_prompt: bool = False
    """A group's sequences begin with the same prompt."""
    model: str = SMALL
    """A name of `models.MODELS`."""

    @property
    def vocab_size(self) -> int:
        """The model's."""
        return MODELS[self.model]["vocab_size"]


_SHORT_ANSWERS = Lengths(
    seed=0, median=71, sigma=0.0, row_tokens=71, num_sequences=32, response_tokens=24, model=SMOLLM2
)
BATCHES = {
    "seed0": Lengths(seed=0, median=150, sigma=0.7, row_tokens=512),
    "seed1": Lengths(seed=1, median=150, sigma=0.7, row_tokens=512),
    "seed2": Lengths(seed=2, median=150, sigma=0.7, row_tokens=512),
    "full": Lengths(seed=0, median=380, sigma=0.3, row_tokens=1024),
    "real": dataclasses.replace(_SHORT_ANSWERS, is_one_prompt=True),
    "real_apart": _SHORT_ANSWERS,
}
MAIN = ("seed0", "seed1", "seed2")
"""The aims of the small model are about the median of these."""
REAL, REAL_APART = "real", "real_apart"


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
    drawn = rng.lognormal(np.log(lengths.median), lengths.sigma, lengths.num_sequences)
    totals = np.clip(np.round(drawn), 32, MAX_TOKENS).astype(int)
    prompts, responses, behavior = [], [], []
    for total in totals:
        quarter = max(4, min(MAX_PROMPT, int(total / 4)))
        prompt_size = quarter if lengths.response_tokens is None else total - lengths.response_tokens
        tokens = rng.integers(2, lengths.vocab_size, total).astype(np.int32)
        tokens[0] = BOS_ID
        if lengths.is_one_prompt and (mate := len(prompts) % GROUP_SIZE):
            tokens[:prompt_size] = prompts[-mate]
        prompts.append(tokens[:prompt_size])
        responses.append(tokens[prompt_size:])
        noise = rng.normal(0, 0.1, total - prompt_size)
        behavior.append(np.minimum(noise - np.log(lengths.vocab_size), 0).astype(np.float32))
    return Batch(
        prompts=prompts,
        responses=responses,
        behavior_logprobs=behavior,
        rewards=rng.normal(size=totals.size),
        row_tokens=lengths.row_tokens,
    )


def model_folder(root: pathlib.Path, batch_name: str) -> pathlib.Path:
    """Where the model of a batch lies, below the folder that a side is given."""
    return root / BATCHES[batch_name].model


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
