"""The fault campaign, short and without vLLM; and what its auditor sees in the evidence of a real run."""

import dataclasses
import pathlib
import shutil
import tempfile
from collections.abc import Generator
from typing import Any

import pytest

from tests.integration.faults import evidence
from tests.integration.faults.audit import audit, surviving, trained_payloads
from tests.integration.faults.evidence import Evidence, Update
from tests.integration.faults.schedule import few
from tests.integration.faults.seed import run_seed
from tests.integration.faults.site import site
from tests.integration.faults.watched_learner import BREAK
from tests.integration.network.namespaces import unavailable

pytestmark = pytest.mark.integration


@dataclasses.dataclass(frozen=True)
class Ran:
    result: dict[str, Any]
    evidence: Evidence


def run(env: dict[str, str] | None = None, *, num_faults: int | None = None) -> Generator[Ran]:
    """A short campaign; its checkpoints are there as long as the generator is."""
    if (reason := unavailable()) is not None:
        pytest.skip(reason)
    folder = pathlib.Path(tempfile.mkdtemp(prefix="sluice-faults-"))
    folder.chmod(0o711)
    try:
        with site(folder / "campaign", num_learners=1, has_vllm=False, learner_env=env or {}) as made:
            result = run_seed(made, few(3)[:num_faults], minutes=5)
            yield Ran(result, evidence.read(made.root))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def ran() -> Generator[Ran]:
    yield from run()


def test_short_campaign_survives_each_fault_and_the_auditor_has_nothing_to_say(ran: Ran):
    outcomes = ran.result["outcomes"]
    assert len(outcomes) == len(few(3)) and all(o["recovery_s"] is not None for o in outcomes), outcomes
    verdict = ran.result["verdict"]
    counts = {k: verdict[k] for k in ("problems", "trained_twice", "lost", "orphans", "unknown_version_tokens")}
    assert not any(counts.values()), counts
    assert verdict["num_lives"] >= 2 and verdict["num_updates"] > 4 and verdict["num_handed_over"] > 0
    assert verdict["replayed"]["num_responses_checked"] > 50


def test_auditor_sees_a_group_trained_in_two_updates(ran: Ran):
    (again, *_), last = surviving(ran.evidence.lives)[0].groups, ran.evidence.lives[-1]
    verdict = audit(with_update(ran.evidence, last.updates[-1], add=again), num_orphans=0)
    assert verdict.trained_twice == 1 and not verdict.is_clean


def test_auditor_leaves_out_what_a_restart_threw_away_and_sees_it_where_a_restart_kept_it(ran: Ran):
    first, second, *others = ran.evidence.lives
    ahead = dataclasses.replace(first, updates=(*first.updates, second.updates[0]))
    thrown_away = dataclasses.replace(ran.evidence, lives=(ahead, second, *others))
    verdict = audit(thrown_away, num_orphans=0)
    assert verdict.is_clean
    assert verdict.num_abandoned_updates == audit(ran.evidence, num_orphans=0).num_abandoned_updates + 1

    kept = dataclasses.replace(second, begins_at=second.begins_at + 1)
    verdict = audit(dataclasses.replace(thrown_away, lives=(ahead, kept, *others)), num_orphans=0)
    assert verdict.trained_twice == len(second.updates[0].groups)
    assert any("contiguous" in p for p in verdict.problems)


def test_auditor_sees_a_group_that_is_acknowledged_and_was_never_trained(ran: Ran):
    update = surviving(ran.evidence.lives)[-1]
    verdict = audit(with_update(ran.evidence, update, remove=update.groups[0]), num_orphans=0)
    assert verdict.lost == 1 and any(update.groups[0] in p for p in verdict.problems)


def test_auditor_sees_a_second_group_of_a_ticket_in_the_store(ran: Ran):
    at = next(i for i, g in enumerate(ran.evidence.groups) if g.op == "INSERT")
    groups = (*ran.evidence.groups[: at + 1], *ran.evidence.groups[at:])
    verdict = audit(dataclasses.replace(ran.evidence, groups=groups), num_orphans=0)
    assert any("second group" in p for p in verdict.problems)


def test_auditor_sees_tokens_of_a_version_that_was_never_announced(ran: Ran):
    used = newest_version(ran.evidence)
    announced = tuple(a for a in ran.evidence.announcements if a != used)
    assert len(announced) < len(ran.evidence.announcements)
    verdict = audit(dataclasses.replace(ran.evidence, announcements=announced), num_orphans=0)
    assert verdict.unknown_version_tokens > 0


@pytest.mark.nightly
@pytest.mark.parametrize("broken", ["twice", "dropped", "stale books"])
def test_auditor_sees_a_learner_that_breaks_exactly_once_on_purpose(broken: str):
    for ran in run({BREAK: broken}, num_faults=1):
        verdict = ran.result["verdict"]
        if broken == "twice":
            assert verdict["trained_twice"] >= 1, verdict
        else:  # all logs are in order: only a quiet run over the same groups can tell
            assert any("losses differ" in p for p in verdict["problems"]), verdict
            assert any("parameters differ" in p for p in verdict["problems"]), verdict


def newest_version(found: Evidence) -> tuple[int, int]:
    """Returns incarnation and step of the newest weights that made a trained token, of groups of one incarnation."""
    trained = {g for update in surviving(found.lives) for g in update.groups}
    groups = [evidence.body(payload) for id_, payload in trained_payloads(found).items() if id_ in trained]
    return max(
        (g["incarnation"], max(int(evidence.array(r["token_versions"]).max()) for r in g["rollouts"]))
        for g in groups
        if all(v["incarnation"] == g["incarnation"] for v in g["older_versions"])
    )


def with_update(found: Evidence, update: Update, *, add: str = "", remove: str = "") -> Evidence:
    """The evidence, had an update another group or one less."""
    micro = tuple(tuple(g for g in together if g != remove) for together in update.micro)
    changed = dataclasses.replace(update, micro=(*micro, (add,)) if add else micro)

    lives = tuple(
        dataclasses.replace(life, updates=tuple(changed if u is update else u for u in life.updates))
        for life in found.lives
    )
    return dataclasses.replace(found, lives=lives)
