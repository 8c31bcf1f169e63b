"""PipelineRL's analytical estimate (TMLR version, appendix A): the closed formulas, and the simulator in its place.

Time is in flashes, the least time a token can take (eq. 9). U(h) is linear up to h = 192, where it is 0.384: r_gen =
U(H) I = 16.9 with H = 192 and I = 44 gives that. Training takes tau = 84 / 17.08 flashes a token: r_train = (N - I) /
tau. Lengths are uniform from 1 to L = 1024; nothing but the rounding of L depends on it. The paper's r_conv_gen of
18.3 comes from its measured curve, the linear one gives 17.0: that is why the speedup here is above its 1.57.

In the conventional system all N accelerators generate, then all train; in the simulator that is `serial` with N
engines and N learner chips. Its lag bound is G - 1 steps with S = B G sequences, so g_max ~ 133 is G = 133.
"""

import dataclasses
import math

import numpy as np

from configs.presets import pipelinerl, rolloutpipe
from configs.sections import AdmissionConfig
from launch.tools.plan import closed_formulas
from launch.tools.plan.profile import EngineProfile, LearnerProfile, Profile
from launch.tools.plan.sim.simulate import simulate
from launch.tools.plan.workload import LengthProfile
from tests.bench.papers.experiment import Experiment

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


def simulated(*, num_updates: int = 50) -> dict[str, float]:
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


def case_study() -> dict[str, float]:
    """Figure 9 and appendix A.4: the search over all (H, I), by the closed formulas; and both systems simulated."""
    by_lag = {g_max: closed_formulas.speedup(SYSTEM, g_max) for g_max in range(1, 257)}
    best = max(by_lag, key=lambda g_max: by_lag[g_max])
    split = closed_formulas.best_split(SYSTEM, best)
    assert split is not None
    large = dataclasses.replace(SYSTEM, batch_size=2048)
    in_time = simulated()
    return {
        "g_max of the largest speed-up": best,
        "H": split.num_running,
        "I": split.num_engines,
        "r_gen of conventional RL": closed_formulas.conventional_generation_rate(SYSTEM, best + 1),
        "r of conventional RL": closed_formulas.conventional_rate(SYSTEM, best + 1),
        "largest speed-up": by_lag[best],
        "g_max at B = 2048": closed_formulas.pipeline_split(large, split.num_running, split.num_engines).max_lag,
        "r of PipelineRL, simulated": in_time["r_pipeline"],
        "r of conventional RL, simulated": in_time["r_conv"],
        "speed-up, simulated": in_time["speedup"],
    }


FIGURE_3_ENGINES, FIGURE_3_UPDATES = 8, 60
"""Not given; with twice the accelerators, engines and the training rate double."""


def figure_3a() -> dict[str, float]:
    """Lag at twice the accelerators over that at once, everything else alike: H = 192, B = 128, uniform lengths."""

    def lags(times: int) -> tuple[float, int]:
        config = pipelinerl.pipelinerl("paper")
        rounds = dataclasses.replace(
            config.rounds, groups_per_round=B // K, groups_per_update=B // K, samples_per_group=K
        )
        config = dataclasses.replace(
            config,
            rounds=rounds,
            admission=AdmissionConfig(policy="window", sequences=H * FIGURE_3_ENGINES * times),
        )
        profile = dataclasses.replace(
            profile_of(FIGURE_3_ENGINES * times, 1, H),
            learner=LearnerProfile(seconds_per_token=1 / (FIGURE_3_ENGINES * times * U_AT_192)),
        )
        outcome = simulate(config, profile, num_updates=FIGURE_3_UPDATES, warmup_updates=FIGURE_3_UPDATES)
        return outcome.token_lag.mean, outcome.group_lag.max

    (mean, largest), (mean_2, largest_2) = lags(1), lags(2)
    return {"mean lag, doubled": mean_2 / mean, "lag of early tokens, doubled": largest_2 / largest}


MEAN_TOKENS = math.sqrt(1024 * 2048)
"""NeurIPS version, section 5: 1K to 2K tokens of at most 8K. The TMLR version gives no mean; its model and data are the
same, so its mean is taken as this one."""


def figure_6a() -> dict[str, float]:
    """Largest lag by appendix A.3, ceil(H I L / (mean L B)): of both versions' setups (section 5)."""
    found = {}
    for name, engines, max_tokens in (("NeurIPS", 16, 8192), ("TMLR", 48, 32768)):
        longest_over_mean = max_tokens / MEAN_TOKENS
        found[name] = 64 * engines * longest_over_mean
    return {"NeurIPS, steps": math.ceil(found["NeurIPS"] / 1024), "TMLR, samples": found["TMLR"]}


_OPEN = "U(h): linear to 0.384 at 192, which U(192) 44 = 16.9 gives; tau from (128 - 44) / tau = 17.08"
EXPERIMENTS = (
    Experiment(paper="PipelineRL", where="Figure 9", predict=case_study, blind=False, left_open=_OPEN),
    Experiment(
        paper="PipelineRL", where="Figure 3(a)", predict=figure_3a, blind=False, left_open="number of engines (8)"
    ),
    Experiment(
        paper="PipelineRL",
        where="Figure 6(a)",
        predict=figure_6a,
        blind=False,
        left_open="mean length: 1.4K, the middle of 1K to 2K; of the TMLR version not given, taken as the same",
    ),
)
