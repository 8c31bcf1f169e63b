"""A campaign: a run on a site, and a schedule of faults, each injected when its phase has come and then watched."""

import asyncio
import collections
import dataclasses
import os
import signal
import time
from collections.abc import Sequence

from absl import logging

from tests.integration.faults.inject import (
    NotThereError,
    comes_with_a_start,
    ends_a_process,
    inject,
    intact_steps,
    needs_a_new_learner,
)
from tests.integration.faults.schedule import CHECKPOINT, HANDOVER, LANES, Fault, Lane
from tests.integration.faults.site import Site

PHASE_S = 240.0
"""How long a phase may take to come: a learner or an engine may have to start before."""
SURVIVE_S = 360.0
"""How long a run may take after a fault has passed until what was hit works again; up to two more of its kind, that
hit it as it starts (`_AT_ONCE`), are in that."""
END_S = 300.0
_ATTEMPTS = 3
"""What was to be hit may die of another lane's fault just then."""
_AT_ONCE = 3
"""How many faults of a lane may not be survived yet: what has to start again may be hit in that very start."""
_LOOK_S = 0.02
_ASK_S = 0.3


@dataclasses.dataclass(kw_only=True)
class Outcome:
    """What became of one fault."""

    fault: Fault
    begin_s: float = 0.0
    """Seconds after the campaign's begin, as the next."""
    injected_s: float | None = None
    """None: its phase never came, or there was nothing to hit."""
    recovery_s: float | None = None
    """From the injection until a group was trained that was made afterwards, by the process that was hit where that is
    an actor's, in a new life of the learner where that is its; what the fault lasted is in it. None: it never was."""
    problem: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Injected:
    life: int
    """The learner's at that moment."""
    at_s: float
    """Monotonic."""
    time_s: float
    """What is made after this (Unix seconds) was made after the fault: where it passes by itself, after it had."""


class Campaign:
    """Injects a schedule into a site."""

    def __init__(self, site: Site, faults: Sequence[Fault], *, minutes: float) -> None:
        """Nothing is started; no fault begins after so many minutes."""
        self._site, self._faults = site, faults
        self._budget_s = 60 * minutes
        self._start_s = time.monotonic()
        self._gates: dict[str, asyncio.Lock] = collections.defaultdict(asyncio.Lock)
        """One fault at a time waits at a process's gate."""
        self.outcomes: list[Outcome] = []

    @property
    def now_s(self) -> float:
        """Since the begin."""
        return time.monotonic() - self._start_s

    async def run(self) -> list[Outcome]:
        """Injects all that there is time for, then brings the run to its end; TimeoutError if it can not."""
        site = self._site
        await site.start()
        keeping = asyncio.create_task(site.keep())
        try:
            await self._until(lambda: site.progress.step >= 4, PHASE_S, "the run's first steps", keeping)
            faults = asyncio.gather(*(self._run_lane(lane) for lane in LANES))
            await asyncio.wait([keeping, faults], return_when=asyncio.FIRST_COMPLETED)
            if keeping.done():
                keeping.result()
            await faults
            await site.finish(deadline_s=END_S)
        finally:
            keeping.cancel()
        return self.outcomes

    async def _run_lane(self, lane: Lane) -> None:
        """One after the other; what comes with a start is injected into the one that the fault before it asked for."""
        unsettled: list[asyncio.Task[None]] = []
        for fault in (f for f in self._faults if f.lane == lane):
            follows = 0 < len(unsettled) < _AT_ONCE and comes_with_a_start(fault)
            if not follows:
                await asyncio.gather(*unsettled)
                unsettled = []
            if self.now_s > self._budget_s:
                break
            outcome = Outcome(fault=fault, begin_s=round(self.now_s, 1))
            self.outcomes.append(outcome)
            if (injected := await self._inject(outcome, follows=follows)) is not None:
                unsettled.append(asyncio.create_task(self._settle(outcome, injected)))
        await asyncio.gather(*unsettled)

    async def _inject(self, outcome: Outcome, *, follows: bool) -> "_Injected | None":
        """Does it when its phase comes; None where that never comes, or there is nothing to hit."""
        fault, site, progress = outcome.fault, self._site, self._site.progress
        life = progress.num_lives
        async with self._gates[fault.held]:
            for _ in range(_ATTEMPTS):
                try:
                    await self._hold(fault, after_life=life if follows else -1)
                    # Whoever reads a checkpoint goes on, and its log may or may not have been read by now.
                    of_life = life if fault.target == CHECKPOINT else progress.num_lives
                    found = _Injected(life=of_life, at_s=time.monotonic(), time_s=time.time())
                    logging.info("fault %s", fault)
                    await inject(site, fault)
                except (NotThereError, ProcessLookupError) as e:
                    outcome.problem, follows = str(e) or type(e).__name__, False
                except TimeoutError as e:
                    outcome.problem = str(e)
                    site.gates.open(fault.held)
                    return None
                else:
                    outcome.injected_s, outcome.problem = round(found.at_s - self._start_s, 1), ""
                    return found if ends_a_process(fault) else dataclasses.replace(found, time_s=time.time())
        return None

    async def _settle(self, outcome: Outcome, injected: "_Injected") -> None:
        """Waits until it is survived, and says how long that took."""
        try:
            async with asyncio.timeout(SURVIVE_S):
                await self._survive(outcome.fault, life=injected.life, passed_s=injected.time_s)
        except TimeoutError:
            outcome.problem = f"nothing was trained afterwards for {SURVIVE_S:.0f} s"
            logging.error("fault not survived %s", outcome.fault)
        else:
            outcome.recovery_s = round(time.monotonic() - injected.at_s, 1)

    async def _hold(self, fault: Fault, *, after_life: int) -> None:
        """Returns when the process stands in the phase; raises NotThereError or TimeoutError if it does not come there.

        A learner is killed for a phase in which it restores, unless it has yet to do so since its life `after_life`. An
        actor is told to leave in the middle of a response, so that it has tokens to hand over.
        """
        site, holds = self._site, lambda: self._site.gates.holds(fault.held)
        if fault.target == CHECKPOINT:
            await self._until(lambda: len(intact_steps(site)) > 1, PHASE_S, "an older checkpoint")
        if fault.phase == HANDOVER:
            site.gates.shut(fault.held, "generating", "middle")
            await self._until(holds, PHASE_S, f"{fault.held} generating")
            process = site.process(fault.held)
            leaving = process.pid
            os.kill(leaving, signal.SIGTERM)
            site.gates.move_on(fault.held, fault.phase, fault.moment)
            await self._until(lambda: holds() or process.pid != leaving, PHASE_S, f"{fault.held} leaves")
            if not holds():
                raise NotThereError("it had nothing to hand over")
        else:
            site.gates.shut(fault.held, fault.phase, fault.moment)
        if needs_a_new_learner(fault):
            await self._until(lambda: holds() or site.progress.num_lives > after_life, PHASE_S, "a learner's start")
            if not holds():
                os.kill(site.learners[0].pid, signal.SIGKILL)
        await self._until(holds, PHASE_S, f"{fault.held} {fault.phase}")

    async def _survive(self, fault: Fault, *, life: int, passed_s: float) -> None:
        """Returns when a group was trained that was made after the fault; by newer weights, where no process ended."""
        progress = self._site.progress
        actor = fault.held if fault.held in self._site.actors else None
        is_learners = ends_a_process(fault) and fault.lane == "learner"
        if not ends_a_process(fault):
            passed_s = await progress.announced_after(passed_s)
        after_life = life if is_learners else 0
        while not await progress.has_trained(made_after_s=passed_s, by=actor, after_life=after_life):
            await asyncio.sleep(_ASK_S)

    async def _until(self, condition, deadline_s: float, what: str, task: "asyncio.Task[None] | None" = None) -> None:
        end_s = time.monotonic() + deadline_s
        while not condition():
            if task is not None and task.done():
                task.result()
            if time.monotonic() > end_s:
                raise TimeoutError(f"{what}: not within {deadline_s:.0f} s")
            await asyncio.sleep(_LOOK_S)
