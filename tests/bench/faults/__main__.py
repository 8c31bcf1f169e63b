"""A run under every kind of fault in every phase, and an auditor that looks at what it left.

    python -m tests.bench.faults [--seed=7] [--minutes=15] [--small]

The tiny preset on machines of their own (network namespaces): PostgreSQL behind TLS, a learner of two hosts, two actors
with a small engine and one with vLLM, weights over HTTPS. A seed draws the faults and their order; each waits until the
process that it is for stands in its phase (`gates.py`), and is survived when a group was trained that was made after
it, by the process that was hit where that is an actor, in a new life of the learner where that is it. Then the run is
brought to its end and audited (`audit.py`, `keepers.py`, `replay.py`). A seed takes 12 minutes on two quiet cores, and
at most 20, all included: no fault begins in the last ones. Needs root and iproute2.

A seed's outcome goes to `results/faults.json`, beside those of other seeds of the same code, and all of them make
`results/faults.md`; those of other code are dropped. `--small`: a handful of faults, no vLLM, nothing is written.
"""

import json
import pathlib
import shutil
import sys
import tempfile
from typing import Any

from absl import app, flags, logging

from tests.bench.faults import table
from tests.bench.job import code_hash
from tests.bench.rig import report
from tests.integration.faults.schedule import draw, few
from tests.integration.faults.seed import run_seed
from tests.integration.faults.site import NUM_LEARNERS, site
from tests.integration.network.namespaces import unavailable

_SEED = flags.DEFINE_integer("seed", 7, "Draws the faults and their order.")
_MINUTES = flags.DEFINE_float("minutes", 15.0, "No fault begins later than so many minutes after the begin.")
_KEEP = flags.DEFINE_bool("keep_folder", False, "Leave the run's folder, logs and evidence where they are.")
WANTED = 200
"""Faults, over all seeds."""


def main(argv: list[str]) -> None:
    del argv
    if (reason := unavailable()) is not None:
        sys.exit(f"error: {reason}")
    logging.set_verbosity(logging.INFO)
    folder = pathlib.Path(tempfile.mkdtemp(prefix="sluice-faults-"))
    folder.chmod(0o711)  # PostgreSQL's user goes through it
    small = report.SMALL.value
    faults = few(_SEED.value) if small else draw(_SEED.value, num_learners=NUM_LEARNERS, has_vllm=True)
    try:
        kept = folder / "run" if _KEEP.value else None
        with site(folder / "campaign", num_learners=NUM_LEARNERS, has_vllm=not small, kept_files=kept) as made:
            result = run_seed(made, faults, minutes=_MINUTES.value)
    finally:
        if not _KEEP.value:
            shutil.rmtree(folder, ignore_errors=True)
    seeds = known_seeds() | {str(_SEED.value): result}
    finish(seeds)


def known_seeds() -> dict[str, Any]:
    """Outcomes of this code that were stored before."""
    folder = report.results_folder()
    file = folder / "faults.json" if folder is not None else None
    if file is None or not file.is_file():
        return {}
    stored = json.loads(file.read_text())
    return stored["seeds"] if stored["code"] == code_hash("tests/integration/faults") else {}


def finish(seeds: dict[str, Any]) -> None:
    """The table of all seeds, their files, and the line."""
    outcomes = [o for seed in seeds.values() for o in seed["outcomes"]]
    verdicts = [seed["verdict"] for seed in seeds.values()]
    counts = {
        key: sum(v[key] for v in verdicts) for key in ("trained_twice", "lost", "orphans", "unknown_version_tokens")
    }
    num_injected, num_survived = len(table.injected(outcomes)), len(table.survived(outcomes))
    values: dict[str, Any] = {
        "faults_injected": num_injected,
        "faults_survived": num_survived,
        **counts,
        "seeds": sorted(map(int, seeds)),
        "least_of_a_kind_and_phase": table.least(outcomes),
        "problems": sum(len(v["problems"]) for v in verdicts),
        "largest_loss_difference": max(v["replayed"]["loss"] for v in verdicts),
    }
    aims = {
        "faults_injected": report.Aim(value=num_injected, aim=WANTED).to_json(),
        "faults_survived": report.Aim(value=num_survived, aim=num_injected).to_json(),
        "least_of_a_kind_and_phase": report.Aim(value=table.least(outcomes), aim=table.LEAST).to_json(),
        **{key: report.Aim(value=count, aim=0, at_least=False).to_json() for key, count in counts.items()},
        "problems": report.Aim(value=values["problems"], aim=0, at_least=False).to_json(),
    }
    report.finish(
        "faults",
        title="Faults",
        about=[_ABOUT],
        table=table.table(outcomes),
        remarks=[*map(_seed_line, seeds, seeds.values()), *_not_survived(outcomes)],
        values=values,
        aims=aims,
        data={"code": code_hash("tests/integration/faults"), "seeds": seeds},
        figure=False,
        beside="one machine for all: PostgreSQL, two hosts of the learner, three actors",
    )


_ABOUT = (
    "The tiny preset over PostgreSQL behind TLS and weights over HTTPS, on machines of their own (network namespaces), "
    "a learner of two hosts, two actors with a small numpy engine and one with vLLM. A fault is injected while the "
    "process that it is for, or that it is to disturb, stands in the phase. Survived/injected, by phase; a fault is "
    "survived when a group was trained that was made after it had passed: by the very actor, or in a new life of the "
    "learner, that was hit. Recovery is the time until then from the injection on, what the fault lasted (2 to 6 s) "
    "and all other faults of that time included: five lanes of faults run side by side."
)


def _seed_line(seed: str, result: dict[str, Any]) -> str:
    verdict, replayed = result["verdict"], result["verdict"]["replayed"]
    outcomes = result["outcomes"]
    said = "; ".join(verdict["problems"]) or "nothing to say"
    return (
        f"Seed {seed}: {len(table.injected(outcomes))} of {result['planned']} faults injected, "
        f"{len(table.survived(outcomes))} survived, in {result['ran_s']:.0f} s. {verdict['num_lives']} lives of the "
        f"learner, {verdict['num_updates']} updates ({verdict['num_abandoned_updates']} more were thrown away by "
        f"restarts), {verdict['num_groups']} groups of {verdict['num_tokens']} tokens. The auditor: {said}; trained "
        f"twice {verdict['trained_twice']}, lost {verdict['lost']}, orphans {verdict['orphans']}, tokens of an unknown "
        f"version {verdict['unknown_version_tokens']}. Against a quiet run: losses differ by {replayed['loss']:.1e} of "
        f"the largest, the last checkpoint's parameters by {replayed['params']:.1e}; logprobs of "
        f"{replayed['num_responses_checked']} responses by {replayed['logprobs']:.1e} nats."
    )


def _not_survived(outcomes: list[dict[str, Any]]) -> list[str]:
    return [
        f"Not {'injected' if o['injected_s'] is None else 'survived'}: {table.what(o)} while {o['fault']['phase']} "
        f"({o['fault']['moment']}): {o['problem']}"
        for o in outcomes
        if o["recovery_s"] is None
    ]


if __name__ == "__main__":
    app.run(main)
