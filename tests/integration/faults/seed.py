"""One seed's campaign from its begin to the auditor's verdict, as JSON."""

import asyncio
import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from tests.integration.faults import audit, evidence, replay
from tests.integration.faults.campaign import Campaign
from tests.integration.faults.kept import marked
from tests.integration.faults.schedule import Fault
from tests.integration.faults.site import END_S, Site

GONE_S = 10.0
"""How long after the end of all a process of the campaign may still be there."""
_LOOK_S = 0.1


def run_seed(made: Site, faults: Sequence[Fault], *, minutes: float) -> dict[str, Any]:
    """Injects the faults, brings the run to its end and audits it; the evidence stays in the site's folder.

    TimeoutError if the run did not begin or end, RuntimeError if the quiet run failed.
    """
    campaign = Campaign(made, faults, minutes=minutes)
    asyncio.run(campaign.run())
    ran_s = campaign.now_s
    verdict = judge(made)
    return {
        "outcomes": [dataclasses.asdict(o) for o in campaign.outcomes],
        "planned": len(faults),
        "verdict": dataclasses.asdict(verdict),
        "ends": {p.role: [f"{e.code}: {e.said}" for e in (*p.ends, p.end)] for p in made.processes},
        "ran_s": round(ran_s, 1),
        "audited_s": round(campaign.now_s - ran_s, 1),
    }


def judge(made: Site) -> audit.Verdict:
    """Of a run that has ended, its store still there."""
    orphans = sum(p.num_orphans for p in made.processes) + _left(made)
    evidence.collect(made.store.ask, {p.role: [*p.ends, p.end] for p in made.processes}, made.root)
    verdict = audit.audit(evidence.read(made.root), num_orphans=orphans)
    replayed = replay.replay(made.root, num_devices=made.num_learners)
    verdict.problems += replay.problems(replayed)
    verdict.unknown_version_tokens += replayed["off_tokens"]
    verdict.replayed = replayed
    if made.num_late_ends:
        verdict.problems.append(f"{made.num_late_ends} processes of a learner outlived another one by {END_S:g} s")
    return verdict


def _left(made: Site) -> int:
    """Processes of the campaign that are there although all have ended."""
    end_s = time.monotonic() + GONE_S
    while (left := marked(made.mark)) and time.monotonic() < end_s:
        time.sleep(_LOOK_S)
    return len(left)
