"""The page of `tests.bench.planner.papers`."""

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tests.bench.planner import inputs
from tests.bench.planner.rolloutpipe_rounds import Rounds

if TYPE_CHECKING:
    from tests.bench.planner.papers import TailBatching

Ranges = Mapping[int, tuple[float, float]]


def markdown(
    found: Sequence["TailBatching"],
    rounds: Sequence[Rounds],
    speedups: Mapping[str, Mapping[str, float]],
    table_2: Mapping[str, Mapping[str, float]],
    reduction: Ranges,
    cgp_share: Ranges,
    aims: Mapping[str, Mapping[str, Any]],
) -> str:
    """All of it."""
    return "\n".join(
        [
            "# The planner on two papers' experiments, told their inputs only",
            "",
            "`python -m tests.bench.planner.papers`. What it is told, from which section, and what a paper leaves open "
            "is in `tests/bench/planner/inputs.py`. Nothing is fitted to what is compared: the inputs were fixed "
            "before comparing, when these results were known: of RollPacker's Table 2 the row of tail batching "
            "(1.30, 1.48, 2.21), what rewards add at 7B/8k (71 %) and the range of the whole (2.03 to 2.56); of "
            "RolloutPipe the main times at R = 96 (659 s and 642 s) and reductions of at least 32.9, 37.6 and 42.3 % "
            "at R = 32, 64 and 96.",
            "",
            "| aim | value | wanted | met |",
            "|---|---|---|---|",
            *(f"| `{k}` | {a['value']:.3f} | {a['aim']} | {'yes' if a['met'] else 'no'} |" for k, a in aims.items()),
            "",
            *_table_2(found, speedups, table_2),
            *_figure_11(found),
            *_rolloutpipe(rounds, reduction, cgp_share),
        ]
    )


def _table_2(
    found: Sequence["TailBatching"],
    speedups: Mapping[str, Mapping[str, float]],
    paper: Mapping[str, Mapping[str, float]],
) -> list[str]:
    others = [f for f in found if f.prompt_share != inputs.PROMPT_SHARES[0]]
    lines = [
        "## RollPacker, Table 2: speed-up over veRL",
        "",
        f"Mean of {len(found) - len(others)} draws of the lengths, of whose spread {inputs.PROMPT_SHARES[0]:g} is the "
        f"prompt's. The paper doesn't say how much is; in the last column it is "
        f"{' and '.join(f'{f.prompt_share:g}' for f in others) or 'no other'}. Each row has what those above it have. "
        "The parallelism planner's row is left out: engines are not elastic in the planner.",
        "",
        "| setting | row | paper | predicted | off | other shares |",
        "|---|---|---|---|---|---|",
    ]
    for name, rows in paper.items():
        for row, published in rows.items():
            mine = speedups[name][row]
            rest = ", ".join(f"{f.speedups[name][row]:.2f}" for f in others) or "-"
            lines.append(f"| {name} | {row} | {published:.2f} | {mine:.2f} | {mine / published - 1:+.0%} | {rest} |")
    return [
        *lines,
        "",
        "What the planner gets wrong:",
        "",
        "- **Tail batching gains too much.** The simulated short round is as short as its lengths make it. On the real "
        "system each round also has prompts to compute, requests to start and to abort, and caches to make room for, "
        "and none of that is told here: a roofline has no overhead.",
        f"- **The stream trainer gains too much**, {_gains(speedups)} where the paper has {_gains(paper)}, though it "
        "trains on the engines' chips. Two causes can be named. Giving chips up costs nothing here, where a migration "
        "takes up to 3 s (section 6.6) and a trainer has to be loaded; a short round only lasts a few times that. And "
        "half of the engines decode about as fast as all do, since a roofline's step hardly depends on how many run.",
        "- **The reward scheduler gains too little at 7B/8k.** Table 1 has the rewards' share at 14B/16k alone; that a "
        "step's rewards take as long at 7B is a guess, and a low one.",
        "",
    ]


def _gains(speedups: Mapping[str, Mapping[str, float]]) -> str:
    """What the last row of Table 2 adds to the one before."""
    gains = [100 * (after / before - 1) for *_, before, after in (rows.values() for rows in speedups.values())]
    return f"{min(gains):.0f} to {max(gains):.0f} %"


def _figure_11(found: Sequence["TailBatching"]) -> list[str]:
    figure = found[0].figure_11
    names = list(next(iter(figure.values())))
    lines = [
        "## RollPacker, Figure 11: rollout time over that without tail batching",
        "",
        "Mean of whole periods. Of the figure's numbers the text has three, each the best over its settings: with both "
        "at 1.25 rollout is up to 3.9 times as fast, and up to 1.5 and 1.6 times as fast as with P or R fixed. Which "
        "models are in it the text doesn't say; all three are here.",
        "",
        f"| setting | {' | '.join(names)} |",
        f"|---|{'---|' * len(names)}",
    ]
    lines += [f"| {name} | {' | '.join(f'{f[n]:.2f}' for n in names)} |" for name, f in figure.items()]

    def best(versus: str) -> float:
        return max(f[versus] / f["P, R 1.25"] for f in figure.values())

    def largest(versus: str) -> float:
        return max(min(v for n, v in f.items() if n.startswith(f"{versus} ")) / f["P, R 1.25"] for f in figure.values())

    base = max(1 / f["P, R 1.25"] for f in figure.values())
    return [
        *lines,
        "",
        "| | paper | predicted |",
        "|---|---|---|",
        f"| both at 1.25, speed-up, up to | 3.9 | {base:.1f} |",
        f"| over P fixed (R alone at 1.25; at its best), up to | 1.5 | {best('R 1.25'):.1f}; {largest('R'):.1f} |",
        f"| over R fixed (P alone at 1.25; at its best), up to | 1.6 | {best('P 1.25'):.1f}; {largest('P'):.1f} |",
        "",
        "That a P of 1.5 is worse than one of 1.25 at 32k it has right. What it gets wrong: with the lengths' spread "
        "mostly the prompt's, racing a few prompts more (P at 1.125) alone does as well as both or better, where the "
        "paper has both contribute; and racing samples helps evenly with eta, where the paper sees a substantial gain "
        "at 1.5 only. So single responses stray from short prompts more, and hard prompts are longer throughout, "
        "than lognormal lengths have it.",
        "",
    ]


def _rolloutpipe(rounds: Sequence[Rounds], reduction: Ranges, cgp_share: Ranges) -> list[str]:
    central = [r for r in rounds if r.sigma == inputs.SIGMAS[0]]
    lines = [
        "## RolloutPipe, R = 32, 64 and 96: time saved over Slime",
        "",
        f"An engine of {inputs.PLACES} places, its step a + b h fitted to serial's rollouts at R = 32 and 96, for each "
        "of four workloads. In the last columns lengths spread less and more "
        f"(sigma {' and '.join(f'{s:g}' for s in inputs.SIGMAS[1:])} instead of {inputs.SIGMAS[0]:g}). The text has "
        "ranges over the workloads; at R = 64 only those over all R.",
        "",
        "| R | | paper | predicted | sigma " + " | sigma ".join(f"{s:g}" for s in inputs.SIGMAS[1:]) + " |",
        "|---|---|---|---|" + "---|" * len(inputs.SIGMAS[1:]),
    ]
    for R, (low, high) in reduction.items():
        share = cgp_share[R]
        for name, published in (("cgp", (low * share[0], high * share[1])), ("cgp_fgd", (low, high))):
            of = [_range([r.reduction(name) for r in rounds if (r.R, r.sigma) == (R, s)]) for s in inputs.SIGMAS]
            lines.append(f"| {R} | {name} | {_range(published)} | {' | '.join(of)} |")
    first = {n: [r.first_dispatch_s[n] for r in central if r.R == 96] for n in ("cgp", "cgp_fgd")}
    steps = [r.step for r in central]
    at_16 = statistics.fmean(16 / (s.base_s + 16 * s.sequence_s) for s in steps)
    at_all = statistics.fmean(inputs.PLACES / (s.base_s + inputs.PLACES * s.sequence_s) for s in steps)
    return [
        *lines,
        "",
        f"First dispatch at R = 96: with CGP {min(first['cgp']):.0f}-{max(first['cgp']):.0f} s (paper 46-90), with "
        f"CGP+FGD {min(first['cgp_fgd']):.0f}-{max(first['cgp_fgd']):.0f} s (paper 52-61).",
        "",
        "What the planner gets wrong: **FGD.** It says that two groups at a time lose, or gain little, where the "
        f"paper's gain 2.5 to 11.4 % over CGP. An engine fitted to serial alone serves {at_16:.0f} tokens/s with 16 "
        f"sequences running and {at_all:.0f} with {inputs.PLACES}; F_w K = 16 then can't feed the trainer. The paper's "
        "engine must have served 16 about as fast as all, which nothing of serial's column says. For the same reason "
        "it has **CGP's first dispatch** too late and its saving too small: the first groups share the engine with too "
        "many others. `planner.md` has the engine that both CGP and CGP+FGD ask for, chosen with their numbers in "
        "sight.",
        "",
    ]


def _range(values: Sequence[float]) -> str:
    return f"{100 * min(values):.1f} to {100 * max(values):.1f} %"
