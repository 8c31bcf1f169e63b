"""Rewards on the critical path: synchronous, asynchronous, and asynchronous with RollPacker's adaptive timeout.

    python -m tests.bench.rewards [--small]

Four actors serve the same rounds of a code task in which 5% of the answers never end, a round each in turn, every
second time in reverse order. Loop, scheduler of rewards, verifier workers, sandboxes and store are the real ones; the
engine is paced: responses take as long as lengths drawn beforehand do at a stated rate (`tests.bench.rewards.workload`
says which figures are the paper's, and from where, and which are ours; all were chosen before anything was run).

* synchronous: rewards begin when all responses of the round have ended; a test case may run 30 s;
* asynchronous: each response is judged when it ends; 30 s as well, which is the baseline of Figure 13(c);
* adaptive: the same with T = min(max(2 s, 1.5 T_anchor), 30 s), anchors in the store. In the first epoch there is none
  until a right answer to the same task has run;
* adaptive, own solutions first: the same, and the rows have programs of their own, as those of APPS and TACO do: the
  actor runs a row's when its first group begins (`actor.rewards.scorer.RewardScorer.begin`). RollPacker has no such
  thing, so its speed-up is the third's; the share that is exposed is told of both.

`adaptive_speedup` is the mean over all rounds of asynchronous over adaptive combined time (from the round's tickets to
its last reward), as in Figure 13(c); `exposed_share` is what rewards add to the rollout, of rollout and reward without
any training, so of less than a step; `*_of_step` is of a whole step, with a training as long, against the rollout, as
the paper's (Table 1, code). All times of tokens, test cases and timeouts are divided by one speed, for all alike. The
fewer answers a round has, the fewer of them hang, and the less likely one of those ended late, where 30 s more are 30 s
more of the round: the paper's rounds (128 x 8) have four times as many.
"""

import asyncio
import collections
import contextlib
import dataclasses
import pathlib
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from absl import app

from actor.rewards.verifier_pool import VerifierPool
from actor.sandbox.pool import Sandbox
from actor.sandbox.self_test import check_isolation
from configs.sections import RewardsConfig
from tests.bench import sandbox as of_sandbox
from tests.bench.harness import result
from tests.bench.harness.estimates import mean
from tests.bench.harness.turns import in_turns
from tests.bench.rewards.arms import ADAPTIVE, ARMS, FIXED, OWN, SYNCHRONOUS, Step, run_arm
from tests.bench.rewards.workload import HANG_SHARE, SAMPLES, SMALL, T_MAX_S, T_MIN_S, WHOLE, Workload

TRAINING_OVER_ROLLOUT = 21 / 66
"""RollPacker, Table 1: code."""


async def measure(workload: Workload, root: pathlib.Path) -> dict[str, list[Step]]:
    """Returns each arm's rounds, which take turns; the workers and their sandboxes are the same for all."""
    size = workload.size
    settings = RewardsConfig(min_timeout_s=T_MIN_S / size.sleep_speed, max_timeout_s=T_MAX_S / size.sleep_speed)
    pool = VerifierPool(num_workers=size.workers, timeout_s=60.0, retries=0, settings=settings)
    try:
        await asyncio.gather(*(pool.load("code") for _ in range(size.workers)))
        found: dict[str, list[Step]] = {arm: [] for arm in ARMS}
        async with contextlib.AsyncExitStack() as running:
            steps = {}
            for arm in ARMS:
                rounds = run_arm(arm, workload, pool, root / arm.replace(", ", "-").replace(" ", "-"))
                steps[arm] = await running.enter_async_context(contextlib.aclosing(rounds))
            for _, arm, _ in in_turns(ARMS, size.epochs * len(size.period)):
                found[arm].append(await anext(steps[arm]))
                print(f"{arm}: {found[arm][-1].combined_s:.2f} s", flush=True)
        return found
    finally:
        await pool.close()


def speedups(slow: Sequence[Step], fast: Sequence[Step]) -> list[float]:
    """Round by round, of the combined time."""
    return [a.combined_s / b.combined_s for a, b in zip(slow, fast, strict=True)]


def exposed_share(steps: Sequence[Step]) -> float:
    """What rewards add to the rollout, of both."""
    return sum(s.exposed_s for s in steps) / sum(s.combined_s for s in steps)


def exposed_share_of_step(steps: Sequence[Step]) -> float:
    """The same of a whole step, with a training as long, against the rollout, as the paper's (Table 1, code)."""
    training_s = TRAINING_OVER_ROLLOUT * sum(s.rollout_s for s in steps)
    return sum(s.exposed_s for s in steps) / (training_s + sum(s.combined_s for s in steps))


def values_of(found: Mapping[str, Sequence[Step]], added_ms: float) -> dict[str, Any]:
    """What the bench says, besides its conditions."""
    rounds, fixed = speedups(found[FIXED], found[ADAPTIVE]), found[FIXED]
    values: dict[str, Any] = {
        "adaptive_speedup": mean(rounds),
        "adaptive_speedup_of_sums": sum(s.combined_s for s in fixed) / sum(s.combined_s for s in found[ADAPTIVE]),
    }
    for label in ("kind", "epoch"):
        for of in sorted({getattr(s, label) for s in fixed}):
            some = [r for r, s in zip(rounds, fixed, strict=True) if getattr(s, label) == of]
            values[f"adaptive_speedup_{of if label == 'kind' else f'epoch_{of}'}"] = statistics.fmean(some)
    return values | {
        "asynchronous_speedup": mean(speedups(found[SYNCHRONOUS], found[FIXED])),
        "exposed_share": exposed_share(found[ADAPTIVE]),
        "exposed_share_asynchronous": exposed_share(found[FIXED]),
        "exposed_share_synchronous": exposed_share(found[SYNCHRONOUS]),
        "exposed_share_of_step": exposed_share_of_step(found[ADAPTIVE]),
        "own_solutions_speedup": mean(speedups(found[FIXED], found[OWN])),
        "own_solutions_exposed_share": exposed_share(found[OWN]),
        "own_solutions_exposed_share_of_step": exposed_share_of_step(found[OWN]),
        "right_timed_out": sum(s.right_timed_out for arm in (ADAPTIVE, OWN) for s in found[arm]),
        "sandbox_added_ms": added_ms,
    }


def main(argv: list[str]) -> None:
    """Runs all, writes the results, prints the JSON line."""
    del argv
    size = SMALL if result.SMALL.value else WHOLE
    check_isolation()
    with Sandbox(num_warm=2) as sandbox:
        took = of_sandbox.costs(sandbox, 5 if result.SMALL.value else 50)
    added_ms = 1000 * (statistics.median(took[of_sandbox.WARM]) - statistics.median(took[of_sandbox.BARE]))
    with tempfile.TemporaryDirectory(prefix="sluice-rewards-") as folder:
        found = asyncio.run(measure(Workload(size=size), pathlib.Path(folder)))
    rows = [
        {"epoch": steps[0].epoch, "round": steps[0].round, "kind": steps[0].kind}
        | {f"combined {n}": s.combined_s for n, s in enumerate(steps)}
        | {f"exposed {n}": s.exposed_s for n, s in enumerate(steps)}
        for steps in zip(*(found[arm] for arm in ARMS), strict=True)
    ]
    verdicts = {
        arm: sum((collections.Counter(s.verdicts) for s in steps), collections.Counter())
        for arm, steps in found.items()
    }
    result.finish(
        "rewards",
        __doc__,
        values=values_of(found, added_ms),
        aims={
            "adaptive_speedup": result.at_least(1.6, "RollPacker, Figure 13(c)"),
            "exposed_share": result.at_most(0.05),
            "own_solutions_exposed_share": result.at_most(0.05),
            "sandbox_added_ms": result.at_most(10.0, "as of tests.bench.sandbox"),
        },
        rows=rows,
        columns={
            "epoch": "{epoch}",
            "round": "{round} ({kind})",
            **{f"{arm}: combined, s": f"{{combined {n}:.2f}}" for n, arm in enumerate(ARMS)},
            **{f"{arm}: exposed, s": f"{{exposed {n}:.2f}}" for n, arm in enumerate(ARMS)},
        },
        notes=[
            f"{size.prompts} prompts x {SAMPLES} responses a round, {size.workers} workers, times divided by "
            f"{size.speed:g}. {HANG_SHARE:.0%} of the answers hang, drawn by hash.",
            "Verdicts: " + "; ".join(f"{arm}: {dict(counts)}" for arm, counts in verdicts.items()) + ".",
        ],
        beside="nothing else of ours",
        size=dataclasses.asdict(size),
        steps={arm: [dataclasses.asdict(s) for s in steps] for arm, steps in found.items()},
    )


if __name__ == "__main__":
    app.run(main)
