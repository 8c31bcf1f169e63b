"""Wire types of tickets, groups and rollouts, validated at construction.

A value that violates its type's contract cannot be built, so every decoded value is valid. Arrays are numpy. Shapes use
P (prompt tokens), T (response tokens) and N (turns).
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Literal

import numpy as np
from jaxtyping import Bool, Float32, Int32
from msgspec import UNSET, Meta, UnsetType

from bridge.routed_experts import RoutedExperts, check_routing
from bridge.validation import check_choice, check_name, check_vector

TicketKind = Literal["train", "eval", "probe"]
"""Purpose of a group. `train`: training data. `eval`: held-out problems. `probe`: comparison of the engine's logprobs
with the learner's after a publish."""

Finish = Literal["stop", "length"]
"""Reason why a response finished. `stop`: an end-of-sequence or stop token, or the environment of an episode was done.
`length`: the token limit, or an episode's budget of turns or tokens."""

Verdict = Literal["ok", "wrong", "timeout", "hang"]
"""Result of a verifier. `ok`: a reward. `wrong`: no reward, or a partial one (`rewards.code_partial`). `timeout`: the
response's own code exceeded its time limit; counts as wrong (RollPacker section 4.3). `hang`: the verifier hung on the
response in every attempt; counts as wrong and has its own counter."""

MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 2.0
"""Temperatures that vLLM applies unchanged, in addition to 0 (greedy). vLLM raises lower ones to 0.01, which would
falsify every importance ratio, and rejects higher ones."""


MAX_SAMPLES = 2**14
"""Most responses that one ticket may request."""
MAX_STOP_TOKENS = 2**12
MAX_REWARD_PARTS = 64
"""Most verifiers that may score one response."""
MAX_ANSWER_CHARS = 200
"""Most characters of the answer that a verifier extracted."""
MAX_ABS_REWARD = 1e6
"""Largest absolute reward of a response or turn. Advantages are float32, which resolves 1e6 from 1e6 + 0.1 but not 1e8
from 1e8 + 1. An advantage times a ratio cap of e^20, squared for the gradient norm, stays below float32's 3e38."""
# msgspec checks the lengths in `Meta` before it reads a list: 64 MiB of small elements would become gigabytes.


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Version:
    """Weight version: the learner's incarnation and the optimizer step of the export.

    The incarnation increases with every learner start. It separates an abandoned branch (weights trained after the
    checkpoint that the learner restored) from the weights that the restarted learner serves.
    """

    incarnation: int
    step: int

    def __post_init__(self) -> None:
        if self.incarnation < 0 or self.step < 0:
            raise ValueError(f"version counts must be >= 0, got {self}")

    def is_abandoned(self, base_steps: Mapping[int, int]) -> bool:
        """Returns True if a later learner rolled back past these weights.

        True if and only if step > b_j for an incarnation j > incarnation, where b_j = `base_steps[j]` is the step that
        j began at. At b_j both learners had the same parameters.
        """
        return any(self.step > base for later, base in base_steps.items() if later > self.incarnation)

    def __str__(self) -> str:
        """Returns `incarnation:step`, the form in which the engine labels tokens."""
        return f"{self.incarnation}:{self.step}"

    @classmethod
    def parse(cls, text: str) -> "Version":
        """Parses `incarnation:step`. Raises ValueError if the text has another form."""
        head, sep, tail = text.partition(":")
        if not (sep and head.isdigit() and tail.isdigit()):
            raise ValueError(f"version: expected incarnation:step, got {text!r}")
        return cls(incarnation=int(head), step=int(tail))


def newest_of_each(versions: Iterable[Version]) -> tuple[Version, ...]:
    """Returns the newest version of each incarnation, oldest first."""
    newest: dict[int, Version] = {}
    for version in versions:
        newest[version.incarnation] = max(version, newest.get(version.incarnation, version))
    return tuple(newest[incarnation] for incarnation in sorted(newest))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling parameters of one response."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """Number of most likely tokens to sample from; 0 keeps the whole vocabulary."""
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: Annotated[tuple[int, ...], Meta(max_length=MAX_STOP_TOKENS)] = ()

    def __post_init__(self) -> None:
        if self.max_tokens < 1 or not 0 <= self.min_tokens <= self.max_tokens:
            raise ValueError(
                f"sampling: expected 1 <= max_tokens and 0 <= min_tokens <= max_tokens, "
                f"got max_tokens={self.max_tokens} min_tokens={self.min_tokens}"
            )
        if self.temperature != 0 and not MIN_TEMPERATURE <= self.temperature <= MAX_TEMPERATURE:
            raise ValueError(
                f"temperature must be 0 or in [{MIN_TEMPERATURE}, {MAX_TEMPERATURE}], got {self.temperature}"
            )
        if not 0 < self.top_p <= 1 or self.top_k < 0:
            raise ValueError(
                f"sampling: expected 0 < top_p <= 1 and top_k >= 0, got top_p={self.top_p} top_k={self.top_k}"
            )


@dataclasses.dataclass(frozen=True, slots=True)
class RewardPart:
    """Verifier of a response and the weight of its score."""

    name: str
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not self.name or not math.isfinite(self.weight):
            raise ValueError(
                f"reward: expected a verifier's name and a finite weight, got {self.name!r}, {self.weight}"
            )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Scoring of a response: verifiers and their inputs, or the environment of an episode."""

    rewards: Annotated[tuple[RewardPart, ...], Meta(max_length=MAX_REWARD_PARTS)]
    """Verifiers of the whole response; the reward is the weighted sum of their scores. May be empty with an
    environment, which gives its own rewards."""
    answer: str
    metadata: str = "{}"
    """JSON that only verifiers and the environment read."""
    environment: str = ""
    """Name of the environment that a response is an episode of; empty: a response is one turn."""
    teacher: str = ""
    """Name of the teacher that scores a response's tokens (loss.teachers); empty: the one for rows that name none."""

    def __post_init__(self) -> None:
        names = [part.name for part in self.rewards]
        if len(set(names)) != len(names):
            raise ValueError(f"task: verifiers must be unique, got {', '.join(names)}")
        if not names and not self.environment:
            raise ValueError("task: expected a verifier or an environment, got neither")

    @classmethod
    def judged_by(cls, verifier: str, *, answer: str, metadata: str = "{}") -> "Task":
        """Returns a task of one turn with one verifier."""
        return cls(rewards=(RewardPart(verifier),), answer=answer, metadata=metadata)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """Request to sample one prompt K times. Tickets are the only credit in the system."""

    id: str
    kind: TicketKind
    round: int
    order: int
    """Submission order; the lowest is served first. Evaluation and probe tickets use negative orders."""
    prompt_tokens: Int32[np.ndarray, " P"]
    task: Task
    num_samples: int
    """Number of rollouts in the group, K."""
    num_requests: int
    """Responses to sample concurrently. The first `num_samples` to finish make the group; more requests than that are a
    race."""
    sampling: Sampling
    min_version: Version
    """Oldest weight version that may generate a token of this ticket's group."""

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, TicketKind)
        check_vector("prompt_tokens", self.prompt_tokens, np.int32)
        if not self.id:
            raise ValueError("ticket: id must not be empty")
        if self.num_samples < 1:
            raise ValueError(f"num_samples must be >= 1, got {self.num_samples} for ticket {self.id}")
        if self.num_requests < self.num_samples:
            raise ValueError(
                f"num_requests must be >= num_samples, got {self.num_requests} < {self.num_samples} "
                f"for ticket {self.id}"
            )
        if self.num_requests > MAX_SAMPLES:
            raise ValueError(f"num_requests must be <= {MAX_SAMPLES}, got {self.num_requests} for ticket {self.id}")


def _no_rewards() -> Float32[np.ndarray, " 0"]:
    return np.zeros(0, np.float32)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RewardScore:
    """Score of one verifier."""

    name: str
    value: float
    """Score before weighting."""
    verdict: Verdict
    answer: str | None = None
    """Answer that the verifier extracted, in a form that is equal for equal answers; the vote for maj@k. Empty if the
    response has no answer. None if the verifier does not extract answers."""

    def __post_init__(self) -> None:
        check_choice("verdict", self.verdict, Verdict)
        if self.answer is not None and len(self.answer) > MAX_ANSWER_CHARS:
            raise ValueError(f"answer must have at most {MAX_ANSWER_CHARS} characters, got {len(self.answer)}")
        if not math.isfinite(self.value):
            raise ValueError(f"the score of {self.name} must be finite, got {self.value}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """Response exactly as the engine sampled it, with its rewards."""

    tokens: Int32[np.ndarray, " T"]
    """Tokens after the prompt: sampled tokens and, in multi-turn rollouts, the environment's tokens."""
    loss_mask: Bool[np.ndarray, " T"]
    """True where the policy sampled the token; only those tokens are trained."""
    behavior_logprobs: Float32[np.ndarray, " T"]
    """Logprobs in nats under the engine's processed distribution (temperature, top-p, top-k); 0 where not sampled."""
    token_versions: Int32[np.ndarray, " T"]
    """Learner step of the weights behind each token; never decreases."""
    finish: Finish
    reward: float
    """Weighted sum of `scores` plus the sum of `turn_rewards`."""
    scores: Annotated[tuple[RewardScore, ...], Meta(max_length=MAX_REWARD_PARTS)] = ()
    """Scores by verifier; empty if no verifier scored the response."""
    turn_rewards: Float32[np.ndarray, " N"] = dataclasses.field(default_factory=_no_rewards)
    """Rewards of the environment, one per turn; empty without an environment. A turn is the tokens sampled between two
    observations."""
    num_thinking_tokens: int = 0
    """Sampled tokens outside the answer: the thinking of all turns, and its marks."""
    is_thinking_finished: bool = True
    """True unless the last turn finishes inside its thinking and therefore has no answer."""
    routed_experts: RoutedExperts | UnsetType = UNSET
    """Routing of prompt and response. UNSET, which is not on the wire: not captured."""
    teacher_logprobs: Float32[np.ndarray, " T"] | UnsetType = UNSET
    """Logprobs of the tokens in nats by a teacher on a server (loss.teacher_url). UNSET: no such teacher."""

    def __post_init__(self) -> None:
        check_choice("finish", self.finish, Finish)
        check_vector("tokens", self.tokens, np.int32)
        check_vector("loss_mask", self.loss_mask, np.bool_)
        check_vector("behavior_logprobs", self.behavior_logprobs, np.float32)
        check_vector("token_versions", self.token_versions, np.int32)
        sizes = {
            self.tokens.size,
            self.loss_mask.size,
            self.behavior_logprobs.size,
            self.token_versions.size,
        }
        if len(sizes) != 1:
            raise ValueError(f"a rollout's arrays must share one length T, got {sorted(sizes)}")
        if not self.loss_mask.any():
            raise ValueError("loss_mask must have a sampled token, got all False")
        # Compared, not subtracted: an int32 difference can wrap around.
        if np.any(self.token_versions[1:] < self.token_versions[:-1]) or self.token_versions[0] < 0:
            raise ValueError("token_versions must be >= 0 and must not decrease")
        if not np.all(np.isfinite(self.behavior_logprobs)) or np.any(self.behavior_logprobs > 1e-3):
            raise ValueError("behavior_logprobs must be finite and <= 0")
        if not np.isfinite(self.reward):
            raise ValueError(f"reward must be finite, got {self.reward}")
        if not 0 <= self.num_thinking_tokens <= self.tokens.size:
            raise ValueError(f"num_thinking_tokens must be in [0, {self.tokens.size}], got {self.num_thinking_tokens}")
        check_routing(self.routed_experts)
        if self.teacher_logprobs is not UNSET:
            check_vector("teacher_logprobs", self.teacher_logprobs, np.float32)
            if self.teacher_logprobs.size != self.tokens.size or not np.all(np.isfinite(self.teacher_logprobs)):
                raise ValueError(f"teacher_logprobs: expected {self.tokens.size} finite logprobs")
        self._check_turns()

    def _check_turns(self) -> None:
        check_vector("turn_rewards", self.turn_rewards, np.float32, may_be_empty=True)
        if not np.all(np.isfinite(self.turn_rewards)):
            raise ValueError(f"turn_rewards must be finite, got {self.turn_rewards.tolist()}")
        if self.turn_rewards.size not in (0, self.num_turns):
            raise ValueError(f"turn_rewards: expected one per turn, {self.num_turns}, got {self.turn_rewards.size}")

    @property
    def num_turns(self) -> int:
        """Number of turns: contiguous runs of sampled tokens."""
        return int(np.count_nonzero(self.loss_mask[1:] & ~self.loss_mask[:-1])) + int(self.loss_mask[0])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The K rollouts of one ticket; a group exists only when it is complete."""

    ticket_id: str
    kind: TicketKind
    round: int
    order: int
    prompt_tokens: Int32[np.ndarray, " P"]
    rollouts: Annotated[tuple[Rollout, ...], Meta(max_length=MAX_SAMPLES)]
    incarnation: int
    """Incarnation of the newest weights that generated any of its tokens."""
    older_versions: Annotated[tuple[Version, ...], Meta(max_length=MAX_SAMPLES)] = ()
    """Newest weights of each earlier incarnation that generated any of its tokens, oldest first; usually empty."""
    actor: str
    """Name of the actor; "a&b" if actor b continued responses of actor a and submitted the group. For a group assembled
    from single samples of several actors: one entry per rollout, joined by "+"."""
    started_s: float
    """Unix time at which its first sample entered the engine."""
    finished_s: float
    """Unix time at which its last reward was known, and its teacher's logprobs."""

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, TicketKind)
        check_vector("prompt_tokens", self.prompt_tokens, np.int32)
        if not self.rollouts:
            raise ValueError(f"group {self.ticket_id} has no rollouts")
        for name in re.split("[+&]", self.actor):
            check_name("actor", name)
        incarnations = [v.incarnation for v in (*self.older_versions, self)]
        if incarnations[0] < 0 or incarnations != sorted(set(incarnations)):
            raise ValueError(f"group {self.ticket_id}: expected rising incarnations >= 0, got {incarnations}")
        for rollout in self.rollouts:
            num_inputs = self.prompt_tokens.size + rollout.tokens.size - 1
            if rollout.routed_experts is not UNSET and len(rollout.routed_experts) != num_inputs:
                raise ValueError(
                    f"group {self.ticket_id}: routed_experts: expected {num_inputs} rows, got "
                    f"{len(rollout.routed_experts)}"
                )
        if not (math.isfinite(self.started_s) and math.isfinite(self.finished_s)):
            raise ValueError(f"a group's times must be finite, got {self.started_s} to {self.finished_s}")

    def is_abandoned(self, base_steps: Mapping[int, int]) -> bool:
        """Returns True if a later learner rolled back past the weights of any of its tokens (`Version.is_abandoned`).

        Of the newest incarnation only the newest step is checked, because a rollback past any of its steps is also past
        that.
        """
        newest = Version(incarnation=self.incarnation, step=self.max_step)
        return any(version.is_abandoned(base_steps) for version in (*self.older_versions, newest))

    @property
    def actors(self) -> frozenset[str]:
        """Names of all actors that sampled any of its tokens."""
        return frozenset(re.split("[+&]", self.actor))

    @property
    def makers(self) -> tuple[str, ...]:
        """Actor behind each rollout; "a&b" if there may be several."""
        names = self.actor.split("+")
        return tuple(names) if len(names) == len(self.rollouts) else (self.actor,) * len(self.rollouts)

    @property
    def min_step(self) -> int:
        """Step of the oldest weights behind any of its tokens."""
        return min(int(r.token_versions[0]) for r in self.rollouts)

    @property
    def max_step(self) -> int:
        """Step of the newest weights behind any of its tokens."""
        return max(int(r.token_versions[-1]) for r in self.rollouts)

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the learner computes: K prompts and K responses."""
        return sum(self.prompt_tokens.size + r.tokens.size for r in self.rollouts)
