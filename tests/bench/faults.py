"""A run under every kind of fault in every phase, and an auditor that looks at what it left.

    python -m tests.bench.faults [--seed=7] [--minutes=15] [--small]

The tiny preset on machines of their own (network namespaces): PostgreSQL behind TLS, a learner of two hosts, two actors
with a small engine and one with vLLM, weights over HTTPS. A seed draws the faults and their order; each waits until the
process that it is for stands in its phase, and is survived when a group was trained that was made after it, by the
process that was hit where that is an actor, in a new life of the learner where that is it. Then the run is brought to
its end and audited (`tests/integration/faults`). A seed takes 12 minutes on two quiet cores, and at most 20, all
included: no fault begins in the last ones. Needs root and iproute2.

A fault is injected while the process that it is for, or that it is to disturb, stands in the phase. The table has
survived/injected, by phase. Recovery is the time from the injection on, what the fault lasted (2 to 6 s) and all other
faults of that time included: five lanes of faults run side by side. A seed's outcome is kept beside those of other
seeds of the same code, and all of them make the result; those of other code are dropped. `--small`: a handful of
faults, no vLLM, nothing is written.
"""

import collections
import pathlib
import shutil
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from absl import app, flags, logging

from tests.bench.harness import result
from tests.bench.harness.benches import BENCHES
from tests.bench.harness.code import code_hash
from tests.integration.faults.schedule import HANDOVER, OF_ACTORS, OF_LEARNERS, SERVER, draw, few
from tests.integration.faults.seed import run_seed
from tests.integration.faults.site import NUM_LEARNERS, site
from tests.integration.network.namespaces import unavailable

_SEED = flags.DEFINE_integer("seed", 7, "Draws the faults and their order.")
_MINUTES = flags.DEFINE_float("minutes", 15.0, "No fault begins later than so many minutes after the begin.")
_KEEP = flags.DEFINE_bool("keep_folder", False, "Leave the run's folder, logs and evidence where they are.")
CAMPAIGN = "tests/integration/faults"
PHASES = (*OF_ACTORS, HANDOVER, *OF_LEARNERS)
NONE = ("trained_twice", "lost", "orphans", "unknown_version_tokens")
"""What no verdict may have any of."""


def main(argv: list[str]) -> None:
    del argv
    if (reason := unavailable()) is not None:
        sys.exit(f"error: {reason}")
    logging.set_verbosity(logging.INFO)
    folder = pathlib.Path(tempfile.mkdtemp(prefix="sluice-faults-"))
    folder.chmod(0o711)  # PostgreSQL's user goes through it
    small = result.SMALL.value
    faults = few(_SEED.value) if small else draw(_SEED.value, num_learners=NUM_LEARNERS, has_vllm=True)
    try:
        kept = folder / "run" if _KEEP.value else None
        with site(folder / "campaign", num_learners=NUM_LEARNERS, has_vllm=not small, kept_files=kept) as made:
            ran = run_seed(made, faults, minutes=_MINUTES.value)
    finally:
        if not _KEEP.value:
            shutil.rmtree(folder, ignore_errors=True)
    stored = result.stored("faults")
    known = stored["seeds"] if stored is not None and stored["code"] == code_hash(BENCHES["faults"].measures) else {}
    finish(known | {str(_SEED.value): ran})


def finish(seeds: Mapping[str, Any]) -> None:
    """Writes the result of all seeds."""
    outcomes = [o for seed in seeds.values() for o in seed["outcomes"]]
    verdicts = [seed["verdict"] for seed in seeds.values()]
    planned = collections.Counter({(what(o), o["fault"]["phase"]): 0 for o in outcomes})
    planned.update((what(o), o["fault"]["phase"]) for o in outcomes if o["injected_s"] is not None)
    num_injected, num_survived = counts_of(outcomes)
    result.finish(
        "faults",
        __doc__,
        values={
            "faults_injected": num_injected,
            "faults_survived": num_survived,
            **{key: sum(v[key] for v in verdicts) for key in NONE},
            "seeds": sorted(map(int, seeds)),
            "least_of_a_kind_and_phase": min(planned.values(), default=0),
            "problems": sum(len(v["problems"]) for v in verdicts),
            "handed_over": sum(v["num_handed_over"] for v in verdicts),
            "largest_loss_difference": max(v["replayed"]["loss"] for v in verdicts),
        },
        aims={
            "faults_injected": result.at_least(200, "ours, over all seeds"),
            "faults_survived": result.at_least(num_injected),
            "least_of_a_kind_and_phase": result.at_least(3, "ours"),
            "handed_over": result.at_least(1, "ours: groups that two actors sampled"),
            **dict.fromkeys((*NONE, "problems"), result.at_most(0)),
        },
        rows=rows_of(outcomes),
        columns={
            "fault": "{kind}",
            **{phase: f"{{{phase}}}" for phase in PHASES},
            "recovery, s: median": "{recovery_s:.0f}",
            "longest": "{longest_s:.0f}",
        },
        notes=[*map(_seed_line, seeds, seeds.values()), *_not_survived(outcomes)],
        beside="one machine for all: PostgreSQL, two hosts of the learner, three actors",
        seeds=seeds,
    )


def what(outcome: Mapping[str, Any]) -> str:
    """What was done to what, whichever of equal ones it was."""
    fault = outcome["fault"]
    target: str = SERVER if fault["target"].startswith(SERVER) else fault["target"]
    target = target.replace("learner-0", "leader").replace("learner-1", "other host")
    names: Mapping[str, str] = {"a": "actor", "b": "actor", "v": "vLLM actor", "engine": "vLLM engine"}
    return f"{fault['kind']}: {'-'.join(names.get(end, end) for end in target.split('-'))}"


def counts_of(outcomes: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
    """Returns how many hit something in their phase, and after how many of those the run went on with what was hit."""
    return sum(o["injected_s"] is not None for o in outcomes), sum(o["recovery_s"] is not None for o in outcomes)


def rows_of(outcomes: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns a row for each kind of fault: survived/injected by phase, and the recoveries."""
    rows: list[dict[str, Any]] = []
    for kind in sorted({what(o) for o in outcomes}):
        own = [o for o in outcomes if what(o) == kind]
        row: dict[str, Any] = {"kind": kind}
        for phase in PHASES:
            injected, survived = counts_of(of_phase := [o for o in own if o["fault"]["phase"] == phase])
            row[phase] = f"{survived}/{injected}" if of_phase else ""
        times = [o["recovery_s"] for o in own if o["recovery_s"] is not None]
        if times:
            row |= {"recovery_s": statistics.median(times), "longest_s": max(times)}
        rows.append(row)
    return rows


def _seed_line(seed: str, ran: Mapping[str, Any]) -> str:
    verdict, replayed = ran["verdict"], ran["verdict"]["replayed"]
    injected, survived = counts_of(ran["outcomes"])
    return (
        f"Seed {seed}: {injected} of {ran['planned']} faults injected, {survived} survived, in {ran['ran_s']:.0f} s. "
        f"{verdict['num_lives']} lives of the learner, {verdict['num_updates']} updates "
        f"({verdict['num_abandoned_updates']} more were thrown away by restarts), {verdict['num_groups']} groups of "
        f"{verdict['num_tokens']} tokens, {verdict['num_handed_over']} of them handed over. The auditor: "
        f"{'; '.join(verdict['problems']) or 'nothing to say'}. Against a quiet run: losses differ by "
        f"{replayed['loss']:.1e} of the largest, the last checkpoint's parameters by {replayed['params']:.1e}; "
        f"logprobs of {replayed['num_responses_checked']} responses by {replayed['logprobs']:.1e} nats."
    )


def _not_survived(outcomes: Sequence[Mapping[str, Any]]) -> list[str]:
    return [
        f"Not {'injected' if o['injected_s'] is None else 'survived'}: {what(o)} while {o['fault']['phase']} "
        f"({o['fault']['moment']}): {o['problem']}"
        for o in outcomes
        if o["recovery_s"] is None
    ]


if __name__ == "__main__":
    app.run(main)
