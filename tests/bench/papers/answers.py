"""What the papers state, by experiment and quantity: committed after the inputs and the predictions.

A range has the paper's bounds. "Up to" is a number of its own, compared with the largest of the predicted settings.
"""

import math
import statistics
from collections.abc import Mapping, Sequence

from tests.bench.papers.experiment import Published
from tests.bench.papers.inputs import COMPUTE_S

WORKLOADS = tuple(COMPUTE_S)
_SAVED = {32: (0.307, 0.329), 64: (0.307, 0.423), 96: (0.398, 0.423)}
"""Of Slime's time, over the workloads (section 5.2); at R = 64 the text has the range over all R alone."""
_CGP_SHARE = {32: (0.71, 0.79), 64: (0.71, 0.96), 96: (0.92, 0.96)}
"""CGP's share of what is saved."""
_TIME = {R: (1 - high, 1 - low) for R, (low, high) in _SAVED.items()}
_CGP_TIME = {R: (1 - _SAVED[R][1] * high, 1 - _SAVED[R][0] * low) for R, (low, high) in _CGP_SHARE.items()}
_WAITING_96 = dict(zip(WORKLOADS, (0.142, 0.150, 0.138, 0.139), strict=True))
_COMPUTE = {
    "cgp": (194.7, 387.6, 589.0, 191.7, 383.4, 573.0, 195.2, 380.7, 584.1, 210.6, 425.7, 640.0),
    "cgp_fgd": (195.9, 391.9, 586.4, 192.5, 375.9, 577.3, 192.5, 385.7, 584.1, 211.1, 426.9, 644.4),
}
"""Table 1's columns, as `COMPUTE_S` has Slime's: by workload, then by R."""
_SLIME = [seconds for by_R in COMPUTE_S.values() for seconds in by_R.values()]

_STATED: dict[str, Mapping[str, Published]] = {
    "RollPacker, Table 2": {
        "7B/8k, tail batching": 1.30,
        "7B/8k, reward scheduler": 2.01,
        "7B/8k, stream trainer": 2.03,
        "14B/16k, tail batching": 1.48,
        "14B/16k, reward scheduler": 1.99,
        "14B/16k, stream trainer": 2.22,
        "32B/32k, tail batching": 2.21,
        "32B/32k, reward scheduler": 2.48,
        "32B/32k, stream trainer": 2.56,
    },
    "RollPacker, Figure 9": {
        "7B/8k, over RLHFuse": 1.14,
        "14B/16k, over RLHFuse": 1.68,
        "32B/32k, over RLHFuse": 2.24,
        **{f"{name}, short rounds over veRL": (2.1, 3.6) for name in ("7B/8k", "14B/16k", "32B/32k")},
        **{f"{name}, short rounds over RLHFuse": (1.2, 3.2) for name in ("7B/8k", "14B/16k", "32B/32k")},
    },
    "RollPacker, Figure 10(b)": {"32B/32k, rollout of short rounds": 7.8},
    "RollPacker, Figure 11": {
        "both at 1.25, up to": 3.9,
        "both over P fixed, up to": 1.5,
        "both over R fixed, up to": 1.6,
    },
    "RollPacker, Section 6.5": {"7B/8k": 1.48, "14B/16k": 1.35, "32B/32k": 1.18},
    "RollPacker, Figure 12(a)": {"adaptive TP over TP 1, mean": 1.9},
    "RollPacker, Figure 12(b), (c)": {
        "preemptions saved in short rounds": 0.138,
        "rollout of short rounds": (1.11, 1.28),
    },
    "RollPacker, Table 3": {"20%": 1.01, "30%": 1.05, "40%": 1.04, "adaptive": 1.08},
    "RollPacker, Figure 14": {
        **{f"{num} GPUs, over veRL": 2.2 for num in (32, 64, 128)},
        **{f"{num} GPUs, over half of them": 1.5 for num in (64, 128)},
    },
    "PipelineRL, Figure 9": {
        "g_max of the largest speed-up": 133,
        "H": 192,
        "I": 44,
        "r_gen of conventional RL": 18.3,
        "r of conventional RL": 10.7,
        "largest speed-up": 1.57,
        "g_max at B = 2048": 8,
        "r of PipelineRL, simulated": 16.9,
        "r of conventional RL, simulated": 10.7,
        "speed-up, simulated": 1.57,
    },
    "PipelineRL, Figure 3(a)": {"mean lag, doubled": 2.0, "lag of early tokens, doubled": 2.0},
    "PipelineRL, Figure 6(a)": {"NeurIPS, steps": 8, "TMLR, samples": (50_000, math.inf)},
    "RolloutPipe, Figure 4": {
        **{f"{w}, R = {R}, time over Slime's": time for w in WORKLOADS for R, time in _TIME.items()},
        **{f"{w}, R = {R}, CGP's time over Slime's": time for w in WORKLOADS for R, time in _CGP_TIME.items()},
        **{f"{w}, R = {R}, time over CGP's": (1 - 0.114, 1 - 0.025) for w in WORKLOADS for R in _SAVED},
    },
    "RolloutPipe, Section 5.2": {
        **{f"{w}, first dispatch, cgp": (46.0, 90.0) for w in WORKLOADS},
        **{f"{w}, first dispatch, cgp_fgd": (52.0, 61.0) for w in WORKLOADS},
        "Sci-XW, main time, cgp": 659.0,
        "Sci-XW, main time, cgp_fgd": 642.0,
    },
    "RolloutPipe, Figure 5": {
        **{f"{w}, R = {R}, waiting ratio": (0.14, 0.33) for w in WORKLOADS for R in (32, 64)},
        **{f"{w}, R = 96, waiting ratio": ratio for w, ratio in _WAITING_96.items()},
    },
    "RolloutPipe, Table 1": {
        f"compute of {name} over Slime's": statistics.fmean(c / s for c, s in zip(column, _SLIME, strict=True))
        for name, column in _COMPUTE.items()
    },
    "ROLL Flash, key results": {"64 GPUs, over synchronous": (1.5, 2.0), "up to": 2.24},
    "ROLL Flash, Figure 7": {"generation time": (2.4, 3.4)},
}
ANSWERS: Mapping[str, Mapping[str, Published]] = _STATED | {
    f"{name}, second engine": _STATED[name]
    for name in ("RolloutPipe, Figure 4", "RolloutPipe, Section 5.2", "RolloutPipe, Figure 5")
}
NOT_COMPARED: Mapping[str, str] = {
    "RollPacker, Figure 8": "validation scores: not given in the text, and not the planner's",
    "RollPacker, Figures 9, 10(a), 10(c), 11, 12(a)": "bars and curves: not given in the text beside the numbers above",
    "RollPacker, Table 2, parallelism": "engines that change their parallelism are not modeled",
    "RollPacker, Table 4": "a trainer that fetches once is not modeled",
    "RollPacker, Figure 13": "judges that share a GPU, and the spread of a verifier's time, are not modeled",
    "PipelineRL, Figures 3(b), 6(b)": "not given in the text; ESS is not the planner's",
    "RolloutPipe, Figure 4": "bars of each workload: not given in the text; Figure 6 is not in it",
    "ROLL Flash, scaling figures, Figure 4, agentic 2.72": "no settings in the text, and no numbers but the largest",
}
WRONG: Sequence[str] = (
    "Changed after the answers were read, beside the second engine: 20 rounds and three seeds, as earlier versions "
    "had, instead of 10 and two, which had given smaller errors in Table 2; the count of preemptions; more points on "
    "the curve of RolloutPipe's engine.",
    "What the planner, or what it is told, gets wrong:",
    """- **RolloutPipe: frontier dispatch loses where the paper's gains**, in all twelve settings; half of all numbers
  are of it. Slime's rollouts alone fit an engine (a + b h seconds a step) that serves 16 sequences at two thirds of
  its full speed. A frontier of two groups runs fewer still, since places stay empty until a group's longest response
  ends. The second engine, whose step is the longer of both parts, has the sign, and gains too much: 43 to 47% saved
  (paper 31 to 42%), 18 to 36% of it over CGP (2.5 to 11.4%). It was chosen in sight, is no better in the median, and
  counts in no aim. Its rollout at R = 32 is not fitted, and comes within 5%. So the truth is between both engines.
- **RolloutPipe: some 35 s of a round are neither tokens nor training.** At a speed that feeds the trainer the first
  two groups take 18 s; the paper dispatches them after 52 to 61 s. It has CGP's first groups earlier (46 to 90 s)
  than an engine gives that runs 169 at once.
- **RollPacker: short rounds are too short at 32B** (10 to 14 times, paper 3.6 and 7.8). Nothing but tokens takes time
  in a simulated round, while log-probabilities, resharding and starts cost the same in each real round.
- **RollPacker: the stream trainer gains too much** (Table 3), also with the 3 s that moving requests
  takes: half of the engines decode nearly as fast as all on a roofline, so the criterion passes at the first try.
- **RollPacker: asynchronous rewards gain too little at 7B.** The text has the rewards' share at 14B alone.
- **RollPacker: twice the GPUs give twice the throughput** (paper: 1.5 times). Communication is not modeled.
- **RollPacker, Figure 12(b): no short round preempts at TP 2** (the paper's planner saves 13.8% of preemptions). The
  share of memory for the cache is not given; vLLM's default leaves room for all. The first prediction counted this as
  100% saved, a mistake that was corrected after the answers were read.
- **RollPacker, Figure 11: racing prompts alone does as well as racing both.** Single responses stray from short prompts
  more than lognormal lengths have it.
- **PipelineRL, Figure 3(a): lag grows by less than twice.** A part of it, filling a batch, does not depend on N.""",
)
