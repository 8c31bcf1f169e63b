"""PipelineRL's analytical estimate (TMLR version, appendix A): the closed formulas, and the simulator in its place.

Time is in flashes, the least time a token can take (eq. 9). U(h) is linear up to h = 192, where it is 0.384: r_gen =
U(H) I = 16.9 with H = 192 and I = 44 gives that. Training takes tau = 84 / 17.08 flashes a token: r_train = (N - I) /
tau. Lengths are uniform from 1 to L = 1024; nothing but the rounding of L depends on it. The paper's r_conv_gen of
18.3 comes from its measured curve, the linear one gives 17.0: that is why the speedup here is above its 1.57.

In the conventional system all N accelerators generate, then all train; in the simulator that is `serial` with N
engines and N learner chips. Its lag bound is G - 1 steps with S = B G sequences, so g_max ~ 133 is G = 133.
"""

import dataclasses

import numpy as np

from configs.presets import pipelinerl, rolloutpipe
from configs.sections import AdmissionConfig
from launch.tools.plan import closed_formulas
from launch.tools.plan.profile import EngineProfile, LearnerProfile, Profile
from launch.tools.plan.sim.simulate import simulate
from launch.tools.plan.workload import LengthProfile

N, B, L, G = 128, 128, 1024, 133
H, I = 192, 44  # noqa: E741 - the paper's names
U_AT_192 = 0.384
TAU = 84 / 17.08
PAPER = {"r_gen": 16.9, "r_train": 17.08, "r_conv": 10.7, "speedup": 1.57}
K = 2


SYSTEM = closed_formulas.System(
    engine_rate=np.minimum(np.arange(1, 513), 192) / 192 * U_AT_192,
    still_running=closed_formulas.uniform_lengths(L),
    num_chips=N,
    batch_size=B,
    train_time=TAU,
)
G_MAX = (1, 2, 4, 8, 16, 32, 64, 100, 133, 160, 200, 256)
"""Largest lags of Figure 9 that the page shows."""


def closed() -> dict[str, float]:
    """Returns equations 10 to 18 at the paper's (H, I) and G."""
    split = closed_formulas.pipeline_split(SYSTEM, H, I)
    r_conv = closed_formulas.conventional_rate(SYSTEM, G)
    return {
        "r_gen": float(SYSTEM.engine_rate[H - 1]) * I,
        "r_train": (N - I) / TAU,
        "r_conv_gen": closed_formulas.conventional_generation_rate(SYSTEM, G),
        "r_conv": r_conv,
        "g_max": split.max_lag,
        "speedup": split.rate / r_conv,
    }


def figure_9() -> list[dict[str, float | None]]:
    """Returns the best (H, I) and both throughputs at each largest lag."""
    rows = []
    for g_max in G_MAX:
        split = closed_formulas.best_split(SYSTEM, g_max)
        rows.append(
            {
                "g_max": g_max,
                "H": split and split.num_running,
                "I": split and split.num_engines,
                "r_pipeline": split and split.rate,
                "r_conv": closed_formulas.conventional_rate(SYSTEM, g_max + 1),
                "speedup": closed_formulas.speedup(SYSTEM, g_max),
            }
        )
    return rows


def profile_of(num_engines: int, num_learner_chips: int, max_num_seqs: int) -> Profile:
    """The appendix's hardware; seconds are flashes."""
    return Profile(
        engine=EngineProfile(running=(192.0,), tokens_per_s=(U_AT_192,), max_num_seqs=max_num_seqs),
        response_tokens=LengthProfile(kind="uniform", max_tokens=L),
        prompt_tokens=LengthProfile(kind="samples", samples=(1,)),
        # A prompt of one token is part of the cost, so tokens are counted as L / 2 + 3 / 2; 0.2 % of tau.
        learner=LearnerProfile(seconds_per_token=TAU),
        num_engines=num_engines,
        num_learner_chips=num_learner_chips,
    )


def simulated(*, num_updates: int = 200) -> dict[str, float]:
    """Both systems in the simulator; rates in tokens a flash."""
    conventional = rolloutpipe.serial("paper")
    rounds = dataclasses.replace(
        conventional.rounds, groups_per_round=B // K * G, groups_per_update=B // K, samples_per_group=K
    )
    run = dataclasses.replace(conventional.run, num_updates=G)
    conventional = dataclasses.replace(conventional, rounds=rounds, run=run)
    slow = simulate(conventional, profile_of(N, N, 192), num_updates=G)
    pipeline = pipelinerl.pipelinerl("paper")
    # Wide enough for all places to be taken: a group of two keeps its slot while only one of its responses runs.
    width = H * I // K * 2
    pipeline = dataclasses.replace(
        pipeline,
        rounds=dataclasses.replace(rounds, train_start="group_ready"),
        admission=AdmissionConfig(policy="window", width=width),
    )
    # At the start all places fill at once; it takes the longest response twice over to forget it.
    warmup = 2 * G
    fast = simulate(pipeline, profile_of(I, N - I, H), num_updates=num_updates, warmup_updates=warmup)
    return {
        "r_pipeline": fast.tokens_per_s,
        "r_conv": slow.tokens_per_s,
        "speedup": fast.tokens_per_s / slow.tokens_per_s,
        "max_lag_pipeline": fast.group_lag.max,
        "mean_token_lag_pipeline": fast.token_lag.mean,
        "max_lag_conv": slow.group_lag.max,
        "engine_fill": fast.engine_fill,
    }
