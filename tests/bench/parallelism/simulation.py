"""Steps of a simulated engine whose tensor parallel size a rule decides after each step.

Inputs, written down before a rule was compared with the paper's figures. Known by then were Figure 12(a)'s mean
speed-up (1.9) and its changes (to 2 at step 3, to 4 at step 8), and an earlier comparison of the rules in this
simulation with another engine.

* Qwen2.5-14B in bfloat16: 28 GB of weights are 142,000 tokens of its KV cache (192 KiB each). What 80 GB at 0.9 leave
  is 224,000 tokens; engines that share their memory with a trainer or a judge have less.
* Section 6.4: 16 devices, response lengths from 8k to 32k by 1k per step. Sections 3 and 6: 128 prompts of 8 responses,
  1.25 times both, are 100 requests per device.
* A fifth of the responses is long, the rest lognormal around an eighth of the longest. Prompts have 512 tokens. Ours.
* Decoding step of n sequences at size t: 5 ms of overhead, 12 ms / t for the weights, 0.25 ms n / t for the sequences
  (their cache at 2.3 TB/s), and 1 ms log2(t) for 96 all-reduces. Prefill: 60 us / t per token. Estimates for an H800.
* An engine holds 256 sequences at any size (vLLM's default). A restart takes 100 s.

With `devices` fixed, as in the paper, an engine of twice the size serves twice the requests. Sluice reserves the
devices of the largest size for each engine, so that the number of engines and their requests stay.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Literal, Protocol

import numpy as np
from jaxtyping import Int32

from actor.elastic import ElasticPolicy, StepStats, kv_tokens_at
from actor.engine_protocol import EngineSize
from launch.tools.plan.profile import EngineProfile
from launch.tools.plan.sim.sim_engine import NEVER, SimEngine

WEIGHTS_KV_TOKENS = 142_000
PROMPT_TOKENS, MAX_NUM_SEQS, MAX_SIZE = 512, 256, 8
GROWING = tuple(range(8_000, 33_000, 1_000))
"""Figure 12(a): longest response of each step."""
WON_SHARE = 1 / 1.25**2
"""Share of a short round's requests that it waits for (section 3)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A sequence of steps."""

    name: str
    kv_tokens: int
    """KV cache of an engine of one device."""
    longest: tuple[int, ...] = GROWING
    """Longest response of each step, in tokens."""
    weights_kv_tokens: int = WEIGHTS_KV_TOKENS
    requests_per_device: int = 100
    start: int = 1
    """Tensor parallel size of the first step."""
    lengths: Literal["tail", "lognormal", "even"] = "tail"
    are_races: bool = False
    """True if four steps in five are short rounds, which end with their first 64% of responses."""
    are_devices_fixed: bool = True
    """False if engines keep their requests at any size (Sluice's placement)."""
    restart_s: float = 100.0
    all_reduce_s: float = 0.001
    """Seconds of a decoding step's all-reduces per doubling of the size."""
    is_held_out: bool = False
    """True if the rule was fixed before the case was run."""

    def size(self, tensor_parallel_size: int) -> EngineSize:
        """Returns the engine at a size."""
        one = EngineSize(
            max_num_seqs=MAX_NUM_SEQS,
            tensor_parallel_size=1,
            kv_tokens=self.kv_tokens,
            weights_kv_tokens=self.weights_kv_tokens,
        )
        kv_tokens = round(kv_tokens_at(one, tensor_parallel_size))
        return dataclasses.replace(one, tensor_parallel_size=tensor_parallel_size, kv_tokens=kv_tokens)

    def responses(self, index: int, tensor_parallel_size: int, seed: int) -> Int32[np.ndarray, " N"]:
        """Returns the response lengths of one engine's step. A larger engine has those of a smaller one and more."""
        rng, longest = np.random.default_rng((seed, index)), self.longest[index]
        num_all = self.requests_per_device * MAX_SIZE
        normal = rng.standard_normal(num_all)
        if self.lengths == "lognormal":
            drawn = longest / 6 * np.exp(normal)
        elif self.lengths == "even":
            drawn = longest / 2 * np.exp(0.3 * normal)
        else:
            long = longest * (1 / 8 + 7 / 8 * np.minimum(1, 1.5 * rng.random(num_all)))
            drawn = np.where(rng.random(num_all) < 0.2, long, longest / 8 * np.exp(0.5 * normal))
        num = self.requests_per_device * (tensor_parallel_size if self.are_devices_fixed else 1)
        return np.clip(drawn[:num], 1, longest).astype(np.int32)

    def profile(self, tensor_parallel_size: int) -> EngineProfile:
        """Returns the engine's speed at a size."""
        t, running = tensor_parallel_size, tuple(2.0**n for n in range(9))
        step_s = [0.005 + 0.012 / t + self.all_reduce_s * math.log2(t) + 0.00025 * n / t for n in running]
        return EngineProfile(
            running=running,
            tokens_per_s=tuple(n / s for n, s in zip(running, step_s, strict=True)),
            max_num_seqs=MAX_NUM_SEQS,
            kv_capacity_tokens=self.size(t).kv_tokens,
            prefill_s_per_token=6e-5 / t,
        )


@functools.cache
def simulate_step(case: Case, index: int, tensor_parallel_size: int, seed: int) -> StepStats:
    """Returns a step of one engine."""
    responses = case.responses(index, tensor_parallel_size, seed)
    engine = SimEngine(case.profile(tensor_parallel_size))
    capacity = engine.profile.kv_capacity_tokens
    for i, tokens in enumerate(responses.tolist()):
        engine.add(0.0, str(i), priority=i, prompt_tokens=PROMPT_TOKENS, response_tokens=tokens)
    is_race = case.are_races and index % 5 != 4
    num_left = math.ceil(WON_SHARE * len(responses)) if is_race else len(responses)
    at_s = peak = 0.0
    while num_left > 0 and (next_s := engine.next_event_s()) < NEVER:
        at_s = next_s
        finished = [int(one.id) for one in engine.advance(at_s)]
        num_left -= len(finished)
        peak = max(peak, engine.kv_tokens + sum(PROMPT_TOKENS + int(responses[i]) for i in finished))
    return StepStats(seconds=at_s, kv_usage_peak=min(1.0, peak / capacity), num_preempted=engine.num_preemptions)


class Rule(Protocol):
    """Decides on the size of the next step."""

    size: int

    def observe(self, step: StepStats) -> None: ...


class Fixed:
    """One size for all steps."""

    def __init__(self, size: int) -> None:
        self.size = size

    def observe(self, step: StepStats) -> None:
        """Does nothing."""


class Bare:
    """The paper's rule as it stands (section 4.2), on raw counts; a change discards the step before."""

    def __init__(self, case: Case) -> None:
        self.size = case.start
        self._last: int | None = None
        self._num_quiet = 0

    def observe(self, step: StepStats) -> None:
        count = step.num_preempted
        self._num_quiet = 0 if count else self._num_quiet + 1
        rises = self._last is not None and count > 1.05 * self._last
        self._last = count
        if rises and self.size < MAX_SIZE:
            self._change(2 * self.size)
        elif self._num_quiet >= 4 and self.size > 1:
            self._change(self.size // 2)

    def _change(self, size: int) -> None:
        self.size, self._last, self._num_quiet = size, None, 0


class Sluice:
    """The planner's own code. A new engine starts with a new policy."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._start(case.start)

    def observe(self, step: StepStats) -> None:
        if (size := self._policy.next_size(step)) != self.size:
            self._start(size)

    def _start(self, size: int) -> None:
        self.size = size
        self._policy = ElasticPolicy(
            size=self._case.size(size), max_tensor_parallel_size=MAX_SIZE, restart_s=self._case.restart_s
        )


def play(case: Case, rule_of: Callable[[Case], Rule], seed: int) -> tuple[float, list[int]]:
    """Returns the seconds of all steps and restarts, and the size in each step."""
    rule, total_s, sizes = rule_of(case), 0.0, []
    for index in range(len(case.longest)):
        if sizes and rule.size != sizes[-1]:
            total_s += case.restart_s
        sizes.append(rule.size)
        step = simulate_step(case, index, rule.size, seed)
        total_s += step.seconds
        rule.observe(step)
    return total_s, sizes
