"""The best that greedy dispatch can do with a rollout: an event simulation of its own, which knows no store or actor.

Every request goes to the engine that runs the fewest at that moment, at once, and nothing beside tokens takes time. It
shares no code with the planner or the system, so what it says a schedule may gain is no echo of either: how much of
that a schedule has got is what tells a scheduler's fault from a bound of the setting.
"""

import collections
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from jaxtyping import Float64

from launch.tools.plan.profile import EngineProfile

_ENDED = 1e-9
"""Tokens: less than that is rounding."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """What a round's rollout is to give, and on what."""

    lengths: Sequence[Sequence[int]]
    """Tokens of each request of each prompt, in the order in which prompts are taken."""
    is_flat: Sequence[bool]
    """Of each prompt, whether its group is filtered out, and another one takes its place when it is complete."""
    num_groups: int
    num_samples: int
    """K: a group is complete with so many of its requests, and the others end."""
    by_sample: bool
    """Requests go to engines one by one; else a group's to one engine."""
    profile: EngineProfile
    num_engines: int
    prompt_tokens: Sequence[int] = ()
    """Of each prompt: they are trained too."""


def rollouts_s(work: Work, *, num_rounds: int) -> list[float]:
    """Seconds of rounds one after the other."""
    prompts = itertools.count()
    return [_Round(work, prompts).run(work.num_groups) for _ in range(num_rounds)]


def trainings_s(
    work: Work, *, num_started: int, seconds_per_token: float, is_streamed: bool, num_rounds: int
) -> list[float]:
    """The same to the end of training, with tail batching (RollPacker, section 3) if more groups start than are wanted.

    Those that a round left are put off; when they are a round's worth, they are one, of K requests each and no more.

    Args:
      work: its groups are trained, one after the other, each with its K responses and as many times its prompt.
      seconds_per_token: trained.
      is_streamed: a group is trained as soon as it is complete; else all when the last one is.
    """
    prompts, put_off, seconds = itertools.count(), collections.deque[int](), []
    long = dataclasses.replace(work, lengths=[mine[: work.num_samples] for mine in work.lengths])
    for _ in range(num_rounds):
        if len(put_off) >= work.num_groups:
            # Those without variance are known when they end; new prompts take their place.
            one = _Round(long, itertools.chain([put_off.popleft() for _ in range(work.num_groups)], prompts))
            rollout_s = one.run(work.num_groups)
        else:
            one = _Round(work, prompts)
            rollout_s = one.run(num_started)
        put_off.extend(one.left)
        now_s = 0.0
        for prompt, (complete_s, num_tokens) in one.complete.items():
            num_tokens += work.num_samples * work.prompt_tokens[prompt]
            now_s = max(now_s, complete_s if is_streamed else rollout_s) + num_tokens * seconds_per_token
        seconds.append(now_s)
    return seconds


def batches_s(work: Work, *, num_rounds: int) -> list[float]:
    """The same with barriers: groups are dealt out in equal numbers, and made up for when all have ended."""
    seconds, first = [], 0
    speeds = _speeds(work.profile)
    for _ in range(num_rounds):
        num_missing, took_s = work.num_groups, 0.0
        while num_missing:
            batch = range(first, first + num_missing)
            dealt = [[n for n in batch[e :: work.num_engines]] for e in range(work.num_engines)]
            took_s += max(_alone_s([t for n in mine for t in work.lengths[n]], speeds) for mine in dealt)
            first += num_missing
            num_missing = sum(work.is_flat[n] for n in batch)
        seconds.append(took_s)
    return seconds


class _Round:
    """A round's rollout."""

    def __init__(self, work: Work, prompts: Iterator[int]) -> None:
        self._work, self._prompts = work, prompts
        self._taken: list[int] = []
        self._filtered: set[int] = set()
        self.complete: dict[int, tuple[float, int]] = {}
        """Prompts whose groups are, in that order: since when, and their responses' tokens."""
        self._speeds = _speeds(work.profile)
        self._engines: list[dict[tuple[int, int], float]] = [{} for _ in range(work.num_engines)]
        """Tokens to go of what each runs, by prompt and request."""
        self._waiting: collections.deque[list[tuple[int, int]]] = collections.deque()
        self._num_ended: collections.Counter[int] = collections.Counter()
        self._num_tokens: collections.Counter[int] = collections.Counter()

    @property
    def left(self) -> list[int]:
        """Prompts that had begun when the round was complete."""
        return [prompt for prompt in self._taken if prompt not in self.complete and prompt not in self._filtered]

    def run(self, num_started: int) -> float:
        """Seconds."""
        work, now_s = self._work, 0.0
        self._take(num_started)
        while len(self.complete) < work.num_groups:
            self._dispatch()
            step_s = min(min(e.values()) / self._speeds[len(e)] for e in self._engines if e)
            now_s += step_s
            for prompt, index in self._advance(step_s):
                if len(self.complete) == work.num_groups:
                    break
                self._num_ended[prompt] += 1
                self._num_tokens[prompt] += work.lengths[prompt][index]
                if self._num_ended[prompt] == work.num_samples:
                    self._drop(prompt)
                    if work.is_flat[prompt]:
                        self._filtered.add(prompt)
                        self._take(1)
                    else:
                        self.complete[prompt] = (now_s, self._num_tokens[prompt])
        return now_s

    def _take(self, num_prompts: int) -> None:
        for prompt in itertools.islice(self._prompts, num_prompts):
            self._taken.append(prompt)
            requests = [(prompt, i) for i in range(len(self._work.lengths[prompt]))]
            self._waiting.extend([r] for r in requests) if self._work.by_sample else self._waiting.append(requests)

    def _dispatch(self) -> None:
        while self._waiting:
            engine = min(self._engines, key=len)
            if len(engine) + len(self._waiting[0]) > self._work.profile.max_num_seqs:
                return
            engine |= {(n, i): float(self._work.lengths[n][i]) for n, i in self._waiting.popleft()}

    def _advance(self, step_s: float) -> Iterable[tuple[int, int]]:
        """Moves all on; gives each request that ends, and is not dropped by an earlier one's end."""
        ended = []
        for engine in self._engines:
            made = step_s * self._speeds[len(engine)]
            for request in engine:
                engine[request] -= made
            ended += [r for r, tokens in engine.items() if tokens <= _ENDED]
        for prompt, index in ended:
            for engine in self._engines:
                if engine.pop((prompt, index), None) is not None:
                    yield prompt, index

    def _drop(self, prompt: int) -> None:
        self._waiting = collections.deque(r for r in self._waiting if r[0][0] != prompt)
        for engine in self._engines:
            for request in [r for r in engine if r[0] == prompt]:
                del engine[request]


def _alone_s(tokens: Sequence[int], speeds: Float64[np.ndarray, " H"]) -> float:
    """Seconds until the last of requests that begin together on one engine has ended."""
    seconds, done = 0.0, 0
    for number, end in enumerate(sorted(tokens)):
        seconds += (end - done) / speeds[len(tokens) - number]
        done = end
    return seconds


def _speeds(profile: EngineProfile) -> Float64[np.ndarray, " H"]:
    """Tokens a second of each of h running requests, by h; of none, none."""
    running = np.arange(1, profile.max_num_seqs + 1)
    return np.concatenate([[0.0], np.interp(running, profile.running, profile.tokens_per_s) / running])
