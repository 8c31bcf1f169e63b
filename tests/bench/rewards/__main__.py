"""Rewards on the critical path: synchronous, asynchronous, and asynchronous with RollPacker's adaptive timeout.

    python -m tests.bench.rewards [--small]

Four actors, one after the other, serve the same rounds of a code task in which 5% of the answers never end. Loop,
scheduler of rewards, verifier workers, sandboxes and store are the real ones; the engine is paced: responses take as
long as lengths drawn beforehand do at a stated rate (`tests.bench.rewards.workload` says which figures are the paper's,
and from where, and which are ours; all were chosen before anything was run).

* synchronous: rewards begin when all responses of the round have ended; a test case may run 30 s;
* asynchronous: each response is judged when it ends; 30 s as well, which is the baseline of Figure 13(c);
* adaptive: the same with T = min(max(2 s, 1.5 T_anchor), 30 s), anchors in the store. In the first epoch there is none
  until a right answer to the same task has run;
* adaptive, own solutions first: the same, and the rows have programs of their own, as those of APPS and TACO do: the
  actor runs a row's when its first group begins (`actor.rewards.scorer.RewardScorer.begin`). RollPacker has no such
  thing, so its speed-up is the third's; the share that is exposed is told of both.

`adaptive_speedup` is the mean over all rounds of asynchronous over adaptive combined time (from the round's tickets to
its last reward), as in Figure 13(c); `exposed_share` is what rewards add to the rollout, of rollout and reward without
any training, so of less than a step. Writes `results/rewards.{json,md}`.
"""

import asyncio
import dataclasses
import pathlib
import statistics
import tempfile
from collections.abc import Mapping, Sequence

from absl import app

from actor.rewards.verifier_pool import VerifierPool
from actor.sandbox.pool import Sandbox
from actor.sandbox.self_test import check_isolation
from configs.sections import RewardsConfig
from tests.bench import sandbox as of_sandbox
from tests.bench.rewards.arms import ADAPTIVE, ARMS, FIXED, OWN, SYNCHRONOUS, Step, run_arm
from tests.bench.rewards.workload import HANG_SHARE, SAMPLES, SMALL, T_MAX_S, T_MIN_S, WHOLE, Workload
from tests.bench.rig import report

TRAINING_OVER_ROLLOUT = 21 / 66
"""RollPacker, Table 1: code."""


async def measure(workload: Workload, root: pathlib.Path) -> dict[str, list[Step]]:
    """Each arm's rounds; the workers and their sandboxes are the same for all."""
    size = workload.size
    settings = RewardsConfig(
        min_timeout_s=T_MIN_S / size.sleep_speed, max_timeout_s=T_MAX_S / size.sleep_speed, sandbox_warm=1
    )
    pool = VerifierPool(num_workers=size.workers, timeout_s=60.0, retries=0, settings=settings)
    try:
        await asyncio.gather(*(pool.load("code") for _ in range(size.workers)))
        found = {}
        for arm in ARMS:
            found[arm] = await run_arm(arm, workload, pool, root / arm.replace(", ", "-").replace(" ", "-"))
            print(f"{arm}: {', '.join(f'{s.combined_s:.2f}' for s in found[arm])} s", flush=True)
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


def values_of(found: Mapping[str, Sequence[Step]], added_ms: float) -> dict[str, float]:
    """What the bench says, besides its conditions."""
    rounds = speedups(found[FIXED], found[ADAPTIVE])
    last = max(s.epoch for s in found[ADAPTIVE])
    of_kind = {
        f"adaptive_speedup_{kind}": statistics.fmean(
            r for r, s in zip(rounds, found[FIXED], strict=True) if s.kind == kind
        )
        for kind in sorted({s.kind for s in found[FIXED]})
    }
    of_epoch = {
        f"adaptive_speedup_epoch_{e}": statistics.fmean(
            r for r, s in zip(rounds, found[FIXED], strict=True) if s.epoch == e
        )
        for e in range(last + 1)
    }
    return {
        "adaptive_speedup": statistics.fmean(rounds),
        "adaptive_speedup_of_sums": sum(s.combined_s for s in found[FIXED])
        / sum(s.combined_s for s in found[ADAPTIVE]),
        **of_kind,
        **of_epoch,
        "asynchronous_speedup": statistics.fmean(speedups(found[SYNCHRONOUS], found[FIXED])),
        "exposed_share": exposed_share(found[ADAPTIVE]),
        "exposed_share_asynchronous": exposed_share(found[FIXED]),
        "exposed_share_synchronous": exposed_share(found[SYNCHRONOUS]),
        "exposed_share_of_step": exposed_share_of_step(found[ADAPTIVE]),
        "own_solutions_speedup": statistics.fmean(speedups(found[FIXED], found[OWN])),
        "own_solutions_exposed_share": exposed_share(found[OWN]),
        "own_solutions_exposed_share_of_step": exposed_share_of_step(found[OWN]),
        "right_timed_out": sum(s.right_timed_out for arm in (ADAPTIVE, OWN) for s in found[arm]),
        "sandbox_added_ms": added_ms,
    }


def main(argv: list[str]) -> None:
    """Runs all, writes the results, prints the JSON line."""
    del argv
    size = SMALL if report.SMALL.value else WHOLE
    workload = Workload(size=size)
    check_isolation()
    with Sandbox(num_warm=2) as sandbox:
        took = of_sandbox.costs(sandbox, 5 if report.SMALL.value else 50)
    added_ms = 1000 * (statistics.median(took[of_sandbox.WARM]) - statistics.median(took[of_sandbox.BARE]))
    with tempfile.TemporaryDirectory(prefix="sluice-rewards-") as folder:
        found = asyncio.run(measure(workload, pathlib.Path(folder)))
    values = values_of(found, added_ms)
    report.finish(
        "rewards",
        title="Rewards on the critical path",
        about=(__doc__ or "").split("\n\n")[2:],
        table=_table(found),
        remarks=_remarks(workload, found, values),
        values=values,
        aims={
            "adaptive_speedup": report.Aim(value=values["adaptive_speedup"], aim=1.6).to_json(),
            "exposed_share": report.Aim(value=values["exposed_share"], aim=0.05, at_least=False).to_json(),
            "own_solutions_exposed_share": report.Aim(
                value=values["own_solutions_exposed_share"], aim=0.05, at_least=False
            ).to_json(),
            # As of `tests.bench.sandbox`.
            "sandbox_added_ms": report.Aim(value=added_ms, aim=10.0, at_least=False).to_json(),
        },
        data={
            "size": dataclasses.asdict(size),
            "steps": {arm: [dataclasses.asdict(s) for s in steps] for arm, steps in found.items()},
        },
        figure=False,
        beside="nothing else of ours",
    )


def _table(found: Mapping[str, Sequence[Step]]) -> report.Table:
    columns = ["epoch", "round", *(f"{arm}: combined, s" for arm in ARMS), *(f"{arm}: exposed, s" for arm in ARMS)]
    rows = [
        [
            str(steps[0].epoch),
            f"{steps[0].round} ({steps[0].kind})",
            *(f"{s.combined_s:.2f}" for s in steps),
            *(f"{s.exposed_s:.2f}" for s in steps),
        ]
        for steps in zip(*(found[arm] for arm in ARMS), strict=True)
    ]
    return report.Table(columns=columns, rows=rows)


def _remarks(workload: Workload, found: Mapping[str, Sequence[Step]], values: Mapping[str, float]) -> list[str]:
    size = workload.size
    num = {
        arm: {v: sum(s.verdicts.get(v, 0) for s in steps) for v in ("ok", "wrong", "timeout", "hang")}
        for arm, steps in found.items()
    }
    return [
        f"{size.prompts} prompts x {SAMPLES} responses a round (the paper: 128 x 8, on a cluster's CPUs), "
        f"{size.workers} workers. All times of tokens, test cases and timeouts are divided by {size.speed:g}, for all "
        f"arms alike; the seconds above are those of the clock. {HANG_SHARE:.0%} of the answers hang, drawn by hash.",
        "Verdicts: " + "; ".join(f"{arm}: {', '.join(f'{v} {n}' for v, n in of.items())}" for arm, of in num.items())
        + f". Right answers that the adaptive timeout ended: {values['right_timed_out']:.0f}.",
        "The fewer answers a round has, the fewer of them hang, and the less likely one of those ended late, where "
        "30 s more are 30 s more of the round: the paper's rounds have four times as many.",
    ]  # fmt: skip


if __name__ == "__main__":
    app.run(main)
