"""An engine far away whose weights are changed behind its back is fenced, and comes back when it is clean, or never."""

import json
import re
import signal
import time

import pytest

from configs.run_folder import run_id
from launch import cli
from learner.parity import MAX_TRIES
from tests.integration.network.places import Places
from tests.integration.network.real.actor import CORRUPT
from tests.integration.network.real.apart import Apart, apart
from tests.integration.support.jobs import check_every_group_trained_once

# Two engines are started, a minute each, and a run of real updates goes on beside.
pytestmark = [pytest.mark.integration, pytest.mark.engine, pytest.mark.nightly]

PER_UPDATE = 4
FIELDS = {
    "run.num_updates": 10_000,
    "rounds.groups_per_round": PER_UPDATE,
    "rounds.groups_per_update": PER_UPDATE,
    "rounds.samples_per_group": 4,
    "admission.width": 2,
    "checkpoint.every_n_steps": 20,
    "evaluation.num_problems": 8,
    "evaluation.every_n_steps": 0,
    "publish.probe_every_n_publishes": 1,
    "actor.max_num_seqs": 16,
    "actor.lease_s": 5,
}
BOUND, START_S = 1e-4, 400.0


def start(run: Apart, name: str, corrupt: str) -> None:
    """An actor whose engine's weights are changed after its n-th update, or each from there on."""
    run.start_actor(
        name,
        "--config.actor.enforce_eager=true",
        module="tests.integration.network.real.actor",
        **{CORRUPT: corrupt},
    )


def events(run: Apart, actor: str, *names: str) -> list[dict]:
    return [e for e in run.trace if e.get("actor") == actor and e["event"] in names]


def fences_in_store(run: Apart) -> set[str]:
    return set(run.where.ask_store("learner", run_id(run.folder), lambda store: store.fenced_actors()))


def check_nothing_trained_while_fenced(run: Apart) -> None:
    """From each fence of an actor to the end of it, none of its groups' gradients is added."""
    fenced: set[str] = set()
    for event in run.trace:
        if event["event"] == "accumulate":
            assert not [g for g in event["groups"] if not fenced.isdisjoint(g[1])], event
        elif event["event"] == "fence":
            fenced.add(event["actor"])
        else:
            fenced.remove(event["actor"])


def check_fetched_anew(log: str) -> None:
    """After the fence all bytes of the version that was there already are fetched again."""
    before, _, after = log.partition("actor fenced reason=")
    downloads = re.compile(r"weights downloaded version=(\S+) bytes=(\d+) of=(\d+) chunks_by_delta=(\d+)")
    version, num_bytes, size, by_delta = downloads.findall(after)[0]
    assert version == downloads.findall(before)[-1][0]
    assert num_bytes == size and by_delta == "0"


def num_by_changed(run: Apart, actor: str) -> int:
    """Groups of an actor that were made by changed weights, and trained before it was fenced."""
    changed = re.search(r"CORRUPTED update=\d+ version=\d+:(\d+)", run.log(actor))
    assert changed is not None
    num = 0
    for event in run.trace:
        if event["event"] == "fence" and event["actor"] == actor:
            break
        num += sum(g[1] == [actor] and g[3] >= int(changed[1]) for g in event.get("groups", []))
    return num


def test_far_engine_with_changed_weights_is_fenced_until_clean_and_one_that_stays_so_is_out_for_good(
    where: Places, tmp_path
):
    began = time.monotonic()
    with apart(where, tmp_path, "fence", FIELDS) as run:
        start(run, "heals", "4")
        run.wait(lambda: bool(events(run, "heals", "unfence")), "it is let in again", deadline_s=START_S)
        healed = run.num_steps
        start(run, "stays-bad", "3-")
        run.wait(lambda: run.actors["stays-bad"].poll() is not None, "it ends", deadline_s=START_S)
        assert run.actors["stays-bad"].returncode == 1
        out = run.num_steps
        run.wait_for_step(out + 10)
        run.learner.send_signal(signal.SIGTERM)
        run.wait(lambda: run.learner.poll() is not None, "the learner's end")
        assert run.learner.returncode == cli.STOPPED, run.logs()

        assert [e["event"] for e in events(run, "heals", "fence", "unfence")] == ["fence", "unfence"]
        assert events(run, "heals", "fence")[0]["off"] > BOUND
        bad = events(run, "stays-bad", "fence", "unfence")
        assert {e["event"] for e in bad} == {"fence"} and len(bad) == 1 + MAX_TRIES
        assert [e["reason"].startswith("for good: ") for e in bad] == [False] * MAX_TRIES + [True]
        assert f"probe {MAX_TRIES} of {MAX_TRIES}" in run.log("stays-bad")
        assert fences_in_store(run) == {"stays-bad"}
        check_nothing_trained_while_fenced(run)
        trained = {a for e in run.trace if e["event"] == "accumulate" for g in e["groups"] for a in g[1]}
        assert "heals" in trained
        check_every_group_trained_once(run.job, num_updates=len(run.job.rows("step")), per_update=PER_UPDATE)

        check_fetched_anew(run.log("heals"))
        print(
            json.dumps(
                {
                    "updates": len(run.job.rows("step")),
                    "let in again at update": healed,
                    "out for good at update": out,
                    "off": {a: [e["off"] for e in events(run, a, "fence")] for a in ("heals", "stays-bad")},
                    "groups by changed weights, trained before": {
                        a: num_by_changed(run, a) for a in ("heals", "stays-bad")
                    },
                    "seconds": round(time.monotonic() - began),
                }
            )
        )
