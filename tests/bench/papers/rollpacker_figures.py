"""RollPacker's evaluation (section 6): tables and figures as experiments. Table 2 and Figure 11 are in `rollpacker.py`.

Inputs are those of `inputs.py`; what a figure adds is beside its function.
"""

import dataclasses
import functools
import statistics
from collections.abc import Mapping
from unittest import mock

from launch.tools.plan.profile import HelperProfile
from launch.tools.plan.sim.event_queue import SimResult
from launch.tools.plan.sim.simulate import simulate
from launch.tools.plan.workload import LengthProfile
from learner.schedule import scale_down_criteria
from tests.bench.papers import inputs, rollpacker
from tests.bench.papers.experiment import Experiment
from tests.bench.papers.inputs import ETA, Setting
from tests.bench.papers.rollpacker import NO_COSTS, Costs

SHARE, SEED = inputs.PROMPT_SHARES[0], inputs.SEEDS[0]
SETTINGS: Mapping[str, Setting] = {s.name: s for s in inputs.SETTINGS}
MIDDLE = SETTINGS[inputs.CALIBRATED]
PERIOD = 5
"""Four short rounds and a long one at eta = 1.25 (Figure 4)."""
SHORT_NAMES = {
    rollpacker.TAIL: "tail batching",
    rollpacker.REWARD: "reward scheduler",
    rollpacker.STREAM: "stream trainer",
}


@functools.cache
def costs(seed: int = SEED) -> Costs:
    """Table 1's, at 14B/16k."""
    return rollpacker.costs_of(MIDDLE, prompt_share=SHARE, seed=seed)


@functools.cache
def steps_of_table_2(name: str, seed: int) -> Mapping[str, float]:
    return rollpacker.table_2(SETTINGS[name], costs(seed), prompt_share=SHARE, seed=seed)


def table_2() -> Mapping[str, float]:
    """Speed-up over veRL; each row has what those above it have. Mean of the seeds."""
    found = {}
    for name in SETTINGS:
        by_seed = [rollpacker.speedups(steps_of_table_2(name, seed)) for seed in inputs.SEEDS]
        for row, short in SHORT_NAMES.items():
            found[f"{name}, {short}"] = statistics.fmean(s[row] for s in by_seed)
    return found


def asynchronous_rewards() -> Mapping[str, float]:
    """Step with synchronous rewards over that with the reward scheduler, both with tail batching."""
    steps = {name: steps_of_table_2(name, SEED) for name in SETTINGS}
    return {name: s[rollpacker.TAIL] / s[rollpacker.REWARD] for name, s in steps.items()}


def run(
    setting: Setting,
    eta: float,
    *,
    reward_s: float,
    streamed: bool,
    num_prompts: int = inputs.P0,
    num_rounds: int = inputs.NUM_ROUNDS,
) -> SimResult:
    """Rounds with training and rewards."""
    profile = rollpacker.profile_of(setting, costs(), prompt_share=SHARE, reward_s=reward_s)
    if streamed:
        profile = dataclasses.replace(profile, helpers=HelperProfile(start_s=inputs.MIGRATION_S))
    config = rollpacker.config_of(eta, eta, streamed=streamed, num_prompts=num_prompts)
    return simulate(config, profile, num_updates=num_rounds, seed=SEED)


def verl(setting: Setting, **sizes: int) -> SimResult:
    """Synchronous rewards, no tail batching, training after the rollout."""
    return run(setting, 1.0, reward_s=costs().reward_s, streamed=False, **sizes)


def full(setting: Setting, **sizes: int) -> SimResult:
    """All but the parallelism planner, which the planner does not model."""
    return run(setting, ETA, reward_s=inputs.ASYNC_REWARD_S, streamed=True, **sizes)


def rounds_s(outcome: SimResult) -> list[float]:
    return [r["round/rollout_to_train_end_s"] for r in outcome.rounds]


def short_rounds(seconds: list[float]) -> list[float]:
    return [s for i, s in enumerate(seconds) if i % PERIOD != PERIOD - 1]


def long_rounds(seconds: list[float]) -> list[float]:
    return seconds[PERIOD - 1 :: PERIOD]


def figure_9() -> Mapping[str, float]:
    """RLHFuse as strengthened in section 6.1: stream trainer and asynchronous rewards, no tail batching."""
    found = {}
    for name, setting in SETTINGS.items():
        slow, ours = verl(setting), full(setting)
        fuse = run(setting, 1.0, reward_s=inputs.ASYNC_REWARD_S, streamed=True)
        short_s = statistics.fmean(short_rounds(rounds_s(ours)))
        found |= {
            f"{name}, over RLHFuse": fuse.step_s / ours.step_s,
            f"{name}, short rounds over veRL": slow.step_s / short_s,
            f"{name}, short rounds over RLHFuse": fuse.step_s / short_s,
        }
    return found


def figure_10() -> Mapping[str, float]:
    """Rollout alone, 32B/32k."""
    setting = SETTINGS["32B/32k"]
    slow, ours = (rollpacker.rollout(setting, eta, eta, prompt_share=SHARE, seed=SEED) for eta in (1.0, ETA))
    return {"32B/32k, rollout of short rounds": slow.step_s / statistics.fmean(short_rounds(rounds_s(ours)))}


def figure_11() -> Mapping[str, float]:
    """The largest of the three settings, as the text has "up to"; with P or R fixed at the same eta, which is 1.25."""
    relative = [rollpacker.figure_11(s, prompt_share=SHARE, seed=SEED) for s in inputs.SETTINGS]
    both = f"P, R {ETA:g}"
    return {
        "both at 1.25, up to": max(1 / r[both] for r in relative),
        "both over P fixed, up to": max(r[f"R {ETA:g}"] / r[both] for r in relative),
        "both over R fixed, up to": max(r[f"P {ETA:g}"] / r[both] for r in relative),
    }


FIGURE_12_GPUS, FIGURE_12_TOKENS = 16, tuple(range(8192, 32768 + 1, 1024))
"""Section 6.4: 14B on 16 GPUs; the response length rises from 8k to 32k by 1k per step."""
DOUBLES_ABOVE, LARGEST_TP = 1.05, 8
"""Section 4.2: TP doubles after so many times the preemptions of the step before; a TP group stays in a server."""


def sized(tensor_parallel_size: int, *, max_tokens: int) -> Setting:
    """14B on 16 GPUs."""
    return dataclasses.replace(
        MIDDLE, num_gpus=FIGURE_12_GPUS, tensor_parallel_size=tensor_parallel_size, max_tokens=max_tokens
    )


@functools.cache
def step_of_length(tensor_parallel_size: int, num_tokens: int) -> tuple[float, int]:
    """Seconds and preemptions of a rollout in which each response has this length."""
    setting = sized(tensor_parallel_size, max_tokens=num_tokens)
    lengths = LengthProfile(kind="samples", samples=(num_tokens,))
    profile = rollpacker.profile_of(setting, NO_COSTS, prompt_share=SHARE, reward_s=0.0, lengths=lengths)
    outcome = simulate(rollpacker.config_of(1.0, 1.0), profile, num_updates=1, seed=SEED)
    return outcome.step_s, outcome.num_preemptions


def figure_12a() -> Mapping[str, float]:
    """Mean of the steps' ratios."""
    size, before, ratios = 1, None, []
    for num_tokens in FIGURE_12_TOKENS:
        seconds, preemptions = step_of_length(size, num_tokens)
        ratios.append(step_of_length(1, num_tokens)[0] / seconds)
        if before is not None and preemptions > DOUBLES_ABOVE * before and size < LARGEST_TP:
            size, before = 2 * size, None
        else:
            before = preemptions
    return {"adaptive TP over TP 1, mean": statistics.fmean(ratios)}


def figure_12bc() -> Mapping[str, float]:
    """Short rounds at 32k: TP 2 without the planner, twice that with it, as preemptions rise from a long round on."""

    def shorts(tensor_parallel_size: int) -> SimResult:
        setting = sized(tensor_parallel_size, max_tokens=32768)
        profile = rollpacker.profile_of(setting, NO_COSTS, prompt_share=SHARE, reward_s=0.0)
        return simulate(rollpacker.config_of(ETA, ETA), profile, num_updates=PERIOD - 1, seed=SEED)

    fixed, adapted = shorts(2), shorts(4)
    saved = fixed.num_preemptions - adapted.num_preemptions
    return {
        "preemptions saved in short rounds": saved / max(1, fixed.num_preemptions),
        "rollout of short rounds": fixed.step_s / adapted.step_s,
    }


TRIGGERS = {
    "20%": (0.2, 0.25),
    "30%": (0.3, 0.35),
    "40%": (0.4, 0.45),
    "adaptive": (scale_down_criteria.FIRST, scale_down_criteria.LAST),
}
"""Shares of complete responses at which GPUs are given up; a fixed trigger has two tries 5% apart."""


def table_3() -> Mapping[str, float]:
    """Long rounds of 7B/8k by when GPUs are given up, over none given up."""

    def long_s(first: float, last: float) -> float:
        with mock.patch.multiple(scale_down_criteria, FIRST=first, LAST=last):
            return statistics.fmean(long_rounds(rounds_s(full(SETTINGS["7B/8k"]))))

    none_s = long_s(2.0, 2.0)
    return {name: none_s / long_s(*bounds) for name, bounds in TRIGGERS.items()}


def figure_14() -> Mapping[str, float]:
    """14B/16k: prompts and GPUs from 128 and 32 to 512 and 128; samples/s."""
    found, last = {}, None
    for times in (1, 2, 4):
        setting = dataclasses.replace(MIDDLE, num_gpus=times * MIDDLE.num_gpus)
        sizes = {"num_prompts": times * inputs.P0, "num_rounds": PERIOD}
        ours = full(setting, **sizes).samples_per_s
        found[f"{setting.num_gpus} GPUs, over veRL"] = ours / verl(setting, **sizes).samples_per_s
        if last is not None:
            found[f"{setting.num_gpus} GPUs, over half of them"] = ours / last
        last = ours
    return found


def _experiment(where: str, predict, *, blind: bool, left_open: str = "") -> Experiment:
    return Experiment(paper="RollPacker", where=where, predict=predict, blind=blind, left_open=left_open)


EXPERIMENTS = (
    _experiment(
        "Table 2",
        table_2,
        blind=False,
        left_open="share of the prompt in the spread of lengths (0.8), reward seconds at 7B and 32B (those at 14B)",
    ),
    _experiment("Figure 9", figure_9, blind=False, left_open="as Table 2"),
    _experiment("Figure 10(b)", figure_10, blind=True, left_open="as Table 2"),
    _experiment("Figure 11", figure_11, blind=False, left_open="models of the figure: the largest of all three"),
    _experiment(
        "Section 6.5", asynchronous_rewards, blind=False, left_open="as Table 2; with tail batching on both sides"
    ),
    _experiment(
        "Figure 12(a)",
        figure_12a,
        blind=False,
        left_open="whether lengths are maxima (each response has the length), tail batching (none)",
    ),
    _experiment(
        "Figure 12(b), (c)", figure_12bc, blind=False, left_open="number of GPUs (16), size after the rise (TP 4)"
    ),
    _experiment("Table 3", table_3, blind=False, left_open="as Table 2; rewards are those of the mixture"),
    _experiment("Figure 14", figure_14, blind=False, left_open="as Table 2"),
)
