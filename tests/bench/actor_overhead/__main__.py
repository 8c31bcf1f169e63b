"""The actor's tokens a second against those of bare AsyncLLM, and against the actor's before environments came.

    python -m tests.bench.actor_overhead [--small]

The same requests (prompts of the tiny task, responses of one length, all sampled) on the same engine, vLLM with the
tiny model on one core: first straight to AsyncLLM, all of them at once, then as tickets through the whole actor, which
claims them from a store, samples, decodes, has each response judged in a worker process, puts groups together and
stores them. Time is from the first request, or ticket, until the last response, or stored group. Beside it a second
process does the same with the code of `BEFORE`, the last commit on which a response was always one turn. The phases
alternate, so that whatever else the machine does meets all of them.

Writes `results/actor_overhead.{json,md}`.
"""

import contextlib
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Generator

from absl import app, logging

from tests.bench.actor_overhead.phase import Phase
from tests.bench.actor_overhead.tree import Tree
from tests.bench.rig import report
from tests.bench.rig.setting import tiny_model

BEFORE = "d868eb1"
ACTOR_AIM, SINGLE_TURN_AIM = 0.97, 0.98
REPO = pathlib.Path(__file__).resolve().parents[3]


def main(argv: list[str]) -> None:
    """Runs all, writes the results, prints the JSON line."""
    del argv
    small = report.SMALL.value
    phase = Phase.small() if small else Phase()
    repeats = 1 if small else 7
    model = tiny_model()
    rates: dict[str, list[float]] = {"bare": [], "actor": [], "before": []}
    with tempfile.TemporaryDirectory(prefix="sluice-overhead-") as folder, contextlib.ExitStack() as parts:
        root = pathlib.Path(folder)
        now = parts.enter_context(Tree.started(REPO, root / "now", model, phase))
        before = parts.enter_context(
            Tree.started(parts.enter_context(_tree_of(BEFORE, root)), root / "before", model, phase)
        )
        for tree in (now, before):  # warms up: kernels, workers, imports
            tree.run("actor")
        now.run("bare")
        for repeat in range(repeats):
            # Each follows each: what a phase leaves behind (frequency, caches) is nobody's alone.
            order = ("bare", "actor", "before") if repeat % 2 else ("before", "actor", "bare")
            for name in order:
                tokens_per_s = (before if name == "before" else now).run("bare" if name == "bare" else "actor")
                rates[name].append(tokens_per_s)
                logging.info("phase=%s repeat=%d tokens_per_s=%.0f", name, repeat, tokens_per_s)
    over_bare = [a / b for a, b in zip(rates["actor"], rates["bare"], strict=True)]
    single_turn = [a / b for a, b in zip(rates["actor"], rates["before"], strict=True)]
    values = {
        "actor_over_bare": statistics.median(over_bare),
        "single_turn_ratio": statistics.median(single_turn),
        **{f"{name}_tokens_per_s": statistics.median(of) for name, of in rates.items()},
    }
    report.finish(
        "actor_overhead",
        title="What the actor costs",
        about=[
            f"The tiny model on vLLM, {phase.max_num_seqs} sequences at once; {phase.num_groups} groups of "
            f"{phase.num_samples} responses of {phase.num_tokens} tokens a phase, judged by `exact`; {repeats} phases "
            f"of each kind in turns. `before` is the actor of commit {BEFORE}."
        ],
        table=report.Table(
            columns=["", "tokens/s, median", "least", "most"],
            rows=[[name, *(f"{f(of):.0f}" for f in (statistics.median, min, max))] for name, of in rates.items()],
        ),
        remarks=[
            f"Actor over bare, by pairs of one repeat: {_spread(over_bare)}; over the actor before: "
            f"{_spread(single_turn)}."
        ],
        values=values,
        aims={
            "actor_over_bare": report.Aim(value=values["actor_over_bare"], aim=ACTOR_AIM).to_json(),
            "single_turn_ratio": report.Aim(value=values["single_turn_ratio"], aim=SINGLE_TURN_AIM).to_json(),
        },
        data={"rates": rates},
        figure=False,
        beside="vLLM on one core, the actor on another",
    )


@contextlib.contextmanager
def _tree_of(commit: str, root: pathlib.Path) -> Generator[pathlib.Path]:
    """The project's files as they were at a commit."""
    tree = root / "tree"
    git = ["git", "-C", str(REPO), "worktree"]
    if (
        made := subprocess.run([*git, "add", "--detach", str(tree), commit], capture_output=True, text=True)
    ).returncode:
        sys.exit(
            f"error: commit {commit} can't be checked out ({made.stderr.strip()}); it needs a clone with its history"
        )
    try:
        yield tree
    finally:
        subprocess.run([*git, "remove", "--force", str(tree)], check=True, capture_output=True)


def _spread(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"


if __name__ == "__main__":
    app.run(main)
