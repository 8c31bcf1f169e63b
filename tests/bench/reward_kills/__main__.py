"""Reward workers, the judge's endpoint and environments' processes killed at random, while a run trains.

    python -m tests.bench.reward_kills [--minutes=10] [--seed=1]

The tiny preset with real vLLM on a mixture of three sources: judged by a verifier in the worker pool, by a judge at an
endpoint of this bench's own, and episodes of an environment. What each response earns is a hash of its text, never 0,
so that a failure which became a reward is seen: an auditor of its own decodes the tokens of each group that was trained
and works out what it had to earn. Kills (SIGKILL, SIGSTOP, an endpoint that answers 500 or nonsense) are drawn by the
seed, one every few seconds, at processes that are at work where there are any. Then the run must go on by itself.

An actor that drops 32 groups in a row ends and is started again: as while a judge is dead and only its groups are left
of a round. Kills without a target fell into such a start. A kill of an idle process costs nothing, and so does a stop
that ends within the deadline; a killed zygote costs each of its episodes an attempt, a dead judge each request that
finds it so. Counts of the run's metrics are up to the last row of each of the actor's lives.
"""

import collections
import dataclasses
import pathlib
import shutil
import tempfile
from collections.abc import Sequence
from typing import Any

from absl import app, flags, logging

from tests.bench.harness import result
from tests.bench.reward_kills.campaign import SETTLED_UPDATES, Outcome, run
from tests.bench.reward_kills.kills import KINDS, RARE, Done
from tests.bench.reward_kills.truth import EPISODE, JUDGE, WORKER

MUST_BE_NONE = ("wrong_rewards", "zero_rewards", "trained_twice", "lost", "unrecorded", "wrong_means", "orphans")
AIMS = {
    **{key: result.at_most(0) for key in MUST_BE_NONE},
    "updates_after_the_last_kill": result.at_least(SETTLED_UPDATES),
    "least_groups_of_a_source_after_the_last_kill": result.at_least(1),
    **{f"failures_of_{who}": result.at_least(1) for who in ("worker", "judge", "episode", "zygote")},
}
_MINUTES = flags.DEFINE_float("minutes", 10.0, "How long processes are killed.")
_SEED = flags.DEFINE_integer("seed", 1, "Draws the kills.")
_KEEP = flags.DEFINE_bool("keep_folder", False, "Leave the run's folder and logs where they are.")


def main(argv: list[str]) -> None:
    """Runs it and writes down what came of it."""
    del argv
    logging.set_verbosity(logging.INFO)
    folder = pathlib.Path(tempfile.mkdtemp(prefix="sluice-reward-kills-"))
    print(f"in {folder}", flush=True)
    try:
        outcome = run(folder, seed=_SEED.value, minutes=_MINUTES.value)
    finally:
        if not _KEEP.value:
            shutil.rmtree(folder, ignore_errors=True)
    counts, busy = _by_kind(outcome.kills), _by_kind([k for k in outcome.kills if k.was_busy])
    values = values_of(outcome)
    verdict = outcome.verdict
    failed = "; ".join(f"{who}: {dict(of) or 'nothing'}" for who, of in outcome.failures.items())
    result.finish(
        "reward_kills",
        __doc__,
        values=values,
        aims=AIMS,
        rows=[
            {"target": who, "how": how, "times": counts[who, how], "at_work": busy[who, how]}
            for who, how in sorted((*KINDS, RARE))
        ],
        columns={"who": "{target}", "what": "{how}", "times": "{times}", "of them at work": "{at_work}"},
        notes=[
            f"{verdict.num_updates} updates, {values['updates_after_the_last_kill']} of them after the last kill, of "
            f"{verdict.num_groups} groups ({dict(verdict.by_source)}) with {verdict.num_responses} responses and "
            f"{verdict.num_turns} turns of episodes. Exit code {outcome.exit_code} (130: it was told to end), "
            f"{outcome.actor_starts} start(s) of the actor.",
            f"The actor's log by failed attempt: {failed}. Groups dropped: {dict(outcome.dropped) or 'none'}.",
        ],
        beside="the whole run: a learner, an actor with vLLM, two verifier workers, a judge, an environment",
        seed=_SEED.value,
        minutes=_MINUTES.value,
        kills=[dataclasses.asdict(k) for k in outcome.kills],
        failures=outcome.failures,
        dropped=outcome.dropped,
        tickets=outcome.ticket_states,
        metrics=outcome.metrics,
        orphans=outcome.orphans,
        verdict=vars(verdict),
    )


def values_of(outcome: Outcome) -> dict[str, Any]:
    """What the bench says, besides its conditions."""
    verdict = outcome.verdict
    return {
        "kills": len(outcome.kills),
        "least_of_a_kind": min(_by_kind(outcome.kills)[kind] for kind in KINDS),
        "kills_of_processes_at_work": sum(k.was_busy for k in outcome.kills),
        "kills_without_a_target": outcome.missed,
        "updates": verdict.num_updates,
        "updates_after_the_last_kill": verdict.num_updates - outcome.updates_at_last_kill,
        "groups_trained": verdict.num_groups,
        **{f"groups_of_{source}": verdict.by_source[source] for source in (WORKER, JUDGE, EPISODE)},
        "least_groups_of_a_source_after_the_last_kill": min(
            outcome.groups_after.get(source, 0) for source in (WORKER, JUDGE, EPISODE)
        ),
        "responses_checked": verdict.num_responses,
        "turns_checked": verdict.num_turns,
        "wrong_rewards": verdict.wrong_rewards,
        "zero_rewards": verdict.zero_rewards,
        "trained_twice": verdict.trained_twice,
        "lost": verdict.lost,
        "unrecorded": verdict.unrecorded,
        "wrong_means": verdict.wrong_means,
        "verifier_failures": outcome.metrics.get("actor/verifier_failures"),
        "episode_failures": outcome.metrics.get("actor/episode_failures"),
        **{f"failures_of_{who}": sum(of.values()) for who, of in outcome.failures.items()},
        "groups_dropped": sum(outcome.dropped.values()),
        "groups_reissued": outcome.metrics.get("groups/reissued"),
        "tickets_given_up": outcome.ticket_states.get("failed", 0),
        "actor_starts": outcome.actor_starts,
        "orphans": len(outcome.orphans),
    }


def _by_kind(kills: Sequence[Done]) -> collections.Counter[tuple[str, str]]:
    return collections.Counter((k.target, k.how) for k in kills)


if __name__ == "__main__":
    app.run(main)
