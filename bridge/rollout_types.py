"""Wire types: everything that travels between processes, validated when it is made.

A value that violates its type's contract cannot be built, so whatever comes out of the codec is
as good as what went in. Arrays are numpy; shapes use P (prompt tokens), T (response tokens).
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Annotated, Literal

import numpy as np
from jaxtyping import Bool, Float32, Int32
from msgspec import Meta

from bridge.validation import check_choice, check_name, check_vector

TicketKind = Literal["train", "eval", "probe"]
"""`train` groups are learned from; `eval` groups are held-out problems; `probe` groups exist to
compare the engine's logprobs with the learner's after a publish."""

Finish = Literal["stop", "length"]
"""Why a response ended: an end-of-sequence or stop token, or the token limit. Of an episode of several turns: its
environment was done, or a budget of turns or tokens was used up."""

Verdict = Literal["ok", "wrong", "timeout", "hang"]
"""What a verifier found. ok: it earns something; wrong: nothing, or a part of it (`rewards.code_partial`). timeout: the
answer's own code ran out of time, which is wrong, too (RollPacker section 4.3). hang: the verifier hung on the answer,
each time that it was asked: wrong, and counted apart."""

MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 2.0
"""What vLLM samples at as it is told, besides 0 (greedy): it raises what is lower to 0.01, so that every ratio would be
another distribution's, and refuses what is higher."""


MAX_SAMPLES = 2**14
"""Responses that one ticket may ask for."""
MAX_STOP_TOKENS = 2**12
MAX_REWARD_PARTS = 64
"""Verifiers that may judge one response."""
MAX_ANSWER_CHARS = 200
"""Of the answer that a verifier says it read."""
MAX_ABS_REWARD = 1e6
"""Of a response or a turn. Advantages are float32, which tells 1e6 from 1e6 + 0.1, but not 1e8 from 1e8 + 1; and an
advantage times a ratio's cap of e^20, squared for the gradient's norm, is still below float32's 3e38."""
# The lengths in `Meta` hold before a list's first element is read: 64 MiB of small ones would become gigabytes.


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Version:
    """Which weights: the learner's incarnation and the optimizer step they were exported at.

    The incarnation goes up each time a learner starts, so weights of an abandoned future (written
    after the checkpoint that a restarted learner went back to) can be told from the ones it serves.
    """

    incarnation: int
    step: int

    def __post_init__(self) -> None:
        """Refuses negative counts."""
        if self.incarnation < 0 or self.step < 0:
            raise ValueError(f"version counts must be >= 0, got {self}")

    def is_abandoned(self, base_steps: Mapping[int, int]) -> bool:
        """Returns True if a later learner went back behind these weights.

        True if and only if step > b_j for an incarnation j > incarnation; b_j is the step that j began at. At b_j both
        learners had the same parameters.

        Args:
          base_steps: b_j by incarnation.
        """
        return any(self.step > base for later, base in base_steps.items() if later > self.incarnation)

    def __str__(self) -> str:
        """`incarnation:step`, the form the engine stamps on its tokens."""
        return f"{self.incarnation}:{self.step}"

    @classmethod
    def parse(cls, text: str) -> "Version":
        """Reads `incarnation:step`.

        Raises:
          ValueError: the text has another form.
        """
        head, sep, tail = text.partition(":")
        if not (sep and head.isdigit() and tail.isdigit()):
            raise ValueError(f"a version reads incarnation:step, got {text!r}")
        return cls(incarnation=int(head), step=int(tail))


def newest_of_each(versions: Iterable[Version]) -> tuple[Version, ...]:
    """Returns the newest version of each incarnation, oldest first."""
    newest: dict[int, Version] = {}
    for version in versions:
        newest[version.incarnation] = max(version, newest.get(version.incarnation, version))
    return tuple(newest[incarnation] for incarnation in sorted(newest))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the engine samples one response."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps the whole vocabulary."""
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: Annotated[tuple[int, ...], Meta(max_length=MAX_STOP_TOKENS)] = ()

    def __post_init__(self) -> None:
        """Refuses values the engine would reject or read otherwise."""
        if self.max_tokens < 1 or not 0 <= self.min_tokens <= self.max_tokens:
            raise ValueError(
                f"want 1 <= max_tokens and 0 <= min_tokens <= max_tokens, "
                f"got max_tokens={self.max_tokens} min_tokens={self.min_tokens}"
            )
        if self.temperature != 0 and not MIN_TEMPERATURE <= self.temperature <= MAX_TEMPERATURE:
            raise ValueError(
                f"want temperature 0 or in [{MIN_TEMPERATURE}, {MAX_TEMPERATURE}], got temperature={self.temperature}"
            )
        if not 0 < self.top_p <= 1 or self.top_k < 0:
            raise ValueError(f"want 0 < top_p <= 1 and top_k >= 0, got top_p={self.top_p} top_k={self.top_k}")


@dataclasses.dataclass(frozen=True, slots=True)
class RewardPart:
    """A verifier that judges a response, and what its score counts."""

    name: str
    weight: float = 1.0

    def __post_init__(self) -> None:
        """Refuses what counts for nothing that could be told."""
        if not self.name or not math.isfinite(self.weight):
            raise ValueError(f"a reward needs a verifier's name and a finite weight, got {self.name!r}, {self.weight}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a response is judged by: verifiers, and what they need; or an environment that it is played in."""

    rewards: Annotated[tuple[RewardPart, ...], Meta(max_length=MAX_REWARD_PARTS)]
    """Each judges the whole response; the reward is the sum of their weighted scores. May be empty in an environment,
    which rewards by itself."""
    answer: str
    metadata: str = "{}"
    """JSON that only verifiers and the environment read."""
    environment: str = ""
    """Name of the environment that a response is an episode of; empty: a response is one turn."""

    def __post_init__(self) -> None:
        """Refuses a task that nothing judges, or one verifier twice."""
        names = [part.name for part in self.rewards]
        if len(set(names)) != len(names):
            raise ValueError(f"a task names each verifier once, got {', '.join(names)}")
        if not names and not self.environment:
            raise ValueError("a task needs a verifier, or an environment")

    @classmethod
    def judged_by(cls, verifier: str, *, answer: str, metadata: str = "{}") -> "Task":
        """A task of one turn with one verifier."""
        return cls(rewards=(RewardPart(verifier),), answer=answer, metadata=metadata)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """One prompt to sample K times: the only credit in the system."""

    id: str
    kind: TicketKind
    round: int
    order: int
    """Submission order; the lowest is served first. Evaluation and probe tickets use negative orders."""
    prompt_tokens: Int32[np.ndarray, " P"]
    task: Task
    num_samples: int
    """K: rollouts of its group."""
    num_requests: int
    """Responses to sample at once; the first `num_samples` to end make the group. More than that is a race."""
    sampling: Sampling
    min_version: Version
    """No token of this ticket's group may come from weights of an earlier step."""

    def __post_init__(self) -> None:
        """Refuses a ticket that no actor could serve."""
        check_choice("kind", self.kind, TicketKind)
        check_vector("prompt_tokens", self.prompt_tokens, np.int32)
        if not self.id:
            raise ValueError("a ticket needs an id")
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
    """What one verifier gave."""

    name: str
    """The verifier's."""
    value: float
    """Before it is weighted."""
    verdict: Verdict
    answer: str | None = None
    """The answer that it read, in a form that is alike for equal answers, by which responses vote (maj@k); empty where
    the response states none. None: it reads no answers."""

    def __post_init__(self) -> None:
        """Refuses a score that is no number, and an answer that is no short one."""
        check_choice("verdict", self.verdict, Verdict)
        if self.answer is not None and len(self.answer) > MAX_ANSWER_CHARS:
            raise ValueError(f"an answer has at most {MAX_ANSWER_CHARS} characters, got {len(self.answer)}")
        if not math.isfinite(self.value):
            raise ValueError(f"the score of {self.name} must be finite, got {self.value}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One verified response, exactly as the engine sampled it."""

    tokens: Int32[np.ndarray, " T"]
    """What follows the prompt: sampled tokens, and in multi-turn rollouts the environment's."""
    loss_mask: Bool[np.ndarray, " T"]
    """True where the policy sampled the token; only those train."""
    behavior_logprobs: Float32[np.ndarray, " T"]
    """Nats, under the engine's processed distribution (temperature, top-p, top-k); 0 where not sampled."""
    token_versions: Int32[np.ndarray, " T"]
    """Learner step of the weights behind each token; never decreases."""
    finish: Finish
    reward: float
    """The weighted sum of `scores`, and that of `turn_rewards`."""
    scores: Annotated[tuple[RewardScore, ...], Meta(max_length=MAX_REWARD_PARTS)] = ()
    """By verifier; none of a response that none was asked about."""
    turn_rewards: Float32[np.ndarray, " N"] = dataclasses.field(default_factory=_no_rewards)
    """An environment's, one a turn: a turn is what was sampled between two observations. None where there is no
    environment."""
    num_thinking_tokens: int = 0
    """Sampled tokens that are no part of an answer: the thinking of all turns, and its marks."""
    is_thinking_finished: bool = True
    """False where the last turn ends within its thinking, and so has no answer."""

    def __post_init__(self) -> None:
        """Refuses ragged, empty or non-finite data."""
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
            raise ValueError("a rollout needs at least one sampled token (loss_mask is all False)")
        # Compared, not subtracted: an int32 difference can wrap around.
        if np.any(self.token_versions[1:] < self.token_versions[:-1]) or self.token_versions[0] < 0:
            raise ValueError("token_versions must be >= 0 and must not decrease")
        if not np.all(np.isfinite(self.behavior_logprobs)) or np.any(self.behavior_logprobs > 1e-3):
            raise ValueError("behavior_logprobs must be finite and <= 0")
        if not np.isfinite(self.reward):
            raise ValueError(f"reward must be finite, got {self.reward}")
        if not 0 <= self.num_thinking_tokens <= self.tokens.size:
            raise ValueError(f"num_thinking_tokens must be in [0, {self.tokens.size}], got {self.num_thinking_tokens}")
        self._check_turns()

    def _check_turns(self) -> None:
        check_vector("turn_rewards", self.turn_rewards, np.float32, may_be_empty=True)
        if not np.all(np.isfinite(self.turn_rewards)):
            raise ValueError(f"turn_rewards must be finite, got {self.turn_rewards.tolist()}")
        if self.turn_rewards.size not in (0, self.num_turns):
            raise ValueError(f"want a reward for each of {self.num_turns} turns, got {self.turn_rewards.size}")

    @property
    def num_turns(self) -> int:
        """Runs of sampled tokens."""
        return int(np.count_nonzero(self.loss_mask[1:] & ~self.loss_mask[:-1])) + int(self.loss_mask[0])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A ticket's K rollouts; it exists only when complete."""

    ticket_id: str
    kind: TicketKind
    round: int
    order: int
    prompt_tokens: Int32[np.ndarray, " P"]
    rollouts: Annotated[tuple[Rollout, ...], Meta(max_length=MAX_SAMPLES)]
    incarnation: int
    """Incarnation of the newest weights that made any of its tokens."""
    older_versions: Annotated[tuple[Version, ...], Meta(max_length=MAX_SAMPLES)] = ()
    """Newest weights of each earlier incarnation that made any of its tokens, oldest first; usually there are none."""
    actor: str
    """Who made it; a name a rollout, with "+" between them, where single samples of several were put together."""
    started_s: float
    """Unix time at which its first sample entered the engine."""
    finished_s: float
    """Unix time at which its last reward was known."""

    def __post_init__(self) -> None:
        """Refuses an empty group."""
        check_choice("kind", self.kind, TicketKind)
        check_vector("prompt_tokens", self.prompt_tokens, np.int32)
        if not self.rollouts:
            raise ValueError(f"group {self.ticket_id} has no rollouts")
        for name in self.actor.split("+"):
            check_name("actor", name)
        incarnations = [v.incarnation for v in (*self.older_versions, self)]
        if incarnations[0] < 0 or incarnations != sorted(set(incarnations)):
            raise ValueError(f"group {self.ticket_id}: expected rising incarnations >= 0, got {incarnations}")
        if not (math.isfinite(self.started_s) and math.isfinite(self.finished_s)):
            raise ValueError(f"a group's times must be finite, got {self.started_s} to {self.finished_s}")

    def is_abandoned(self, base_steps: Mapping[int, int]) -> bool:
        """Returns True if a later learner went back behind the weights of any of its tokens (`Version.is_abandoned`).

        The newest step stands for the newest incarnation: what came after that one decides about all tokens alike.
        """
        newest = Version(incarnation=self.incarnation, step=self.max_step)
        return any(version.is_abandoned(base_steps) for version in (*self.older_versions, newest))

    @property
    def actors(self) -> frozenset[str]:
        """The names of all who made it."""
        return frozenset(self.actor.split("+"))

    @property
    def makers(self) -> tuple[str, ...]:
        """The name of who made each rollout."""
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
        """Tokens the learner computes: K prompts and K responses."""
        return sum(self.prompt_tokens.size + r.tokens.size for r in self.rollouts)
