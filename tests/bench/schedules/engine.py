"""Actors with their engines: real admission, sampler, group builder and rule of abandoned weights; simulated tokens.

A sample's tokens are all its number, by which the world knows the weights behind each of them.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Iterable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from actor.admission import Admission
from actor.engine_protocol import Sample
from actor.rewards.scorer import RewardResult
from actor.sampling import Sampler, _EngineRequest  # pyright: ignore[reportPrivateUsage]
from actor.serving import Member, build_group
from actor.weight_updates import _is_abandoned  # pyright: ignore[reportPrivateUsage]  # the rule that actors follow
from bridge.heartbeat_types import Heartbeat
from bridge.rollout_types import Ticket, Version
from bridge.store.store_types import FencedError, UnfitGroupError
from tests.bridge.factories import make_report
from tests.learner.schedule.fakes import Marks

if TYPE_CHECKING:
    from tests.bench.schedules.world import World

LEASE_S, MAX_ATTEMPTS = 30.0, 3


@dataclasses.dataclass
class Request:
    """A sample in progress."""

    number: int
    length: int
    start_step: int
    versions: list[Version]


class Ticketed:
    """A ticket in service: its requests, those that ended, the winners among them."""

    def __init__(self, ticket: Ticket, requests: dict[int, Request]) -> None:
        self.ticket, self.running = ticket, requests
        self.ended: dict[int, Request] = {}


class Engine:
    """An actor with its engine: real admission, group builder and rule of abandoned weights."""

    def __init__(self, name: str, world: "World") -> None:
        self.name, self.world = name, world
        self.version: Version | None = None
        self.start_over()

    def start_over(self) -> None:
        """A process of this name begins with nothing."""
        self.version = None
        self.admission = Admission.of(self.world.config)
        self.serving: dict[str, Ticketed] = {}

    def take_weights(self) -> None:
        """Serves the announced version, in flight."""
        manifest = self.world.announced
        if manifest is None or (self.version is not None and manifest.version <= self.version):
            return
        actor: Any = SimpleNamespace(engine=SimpleNamespace(version=self.version))
        if _is_abandoned(actor, manifest):
            self.restart(self.serving)
        self.version = manifest.version
        self._restart_stale()
        self.beat()

    def beat(self) -> None:
        """Says that it lives, and what it serves."""
        store = self.world.shared
        beat = Heartbeat(
            process=self.name, role="actor", pid=1, time_s=store.now_s(), version=self.version, report=make_report()
        )
        store.heartbeat(beat)

    def claim(self) -> None:
        """Claims and begins what its admission lets it."""
        if self.version is None:
            return
        shared = self.world.shared
        admission = self.admission
        width = admission.width if admission.policy == "frontier" else None
        engines = self.world.engines
        admission.rebalance({self.world.config.actor.max_num_seqs: len(engines)})
        try:
            tickets = shared.claim(
                self.name,
                limit=admission.num_to_claim(),
                lease_s=LEASE_S,
                width=width,
                among=1 if admission.policy == "window" else len(engines),
                part=admission.samples_per_engine,
            )
        except FencedError:
            self.world.replace(self)
            return
        waiting = {t.id for t in admission.waiting}
        for ticket in tickets:  # a ticket that is here already: its lease had ended, or another took its place
            if ticket.id in self.serving or ticket.id in waiting:
                self.forget(ticket.id)
        admission.offer(tickets)
        for ticket in admission.admit(self.version):
            self._begin(ticket)

    def _begin(self, ticket: Ticket) -> None:
        self.serving[ticket.id] = Ticketed(ticket, {i: self._request() for i in range(ticket.num_requests)})

    def _request(self) -> Request:
        assert self.version is not None
        return Request(self.world.next_number(), self.world.draw_length(), self.version.step, [])

    def restart(self, ticket_ids: Iterable[str]) -> None:
        """Begins these tickets from their prompts, on the weights that are served next."""
        restarting = [self.serving[id_].ticket for id_ in list(ticket_ids)]
        for ticket in restarting:
            self.forget(ticket.id)
        self.admission.offer(restarting)

    def _restart_stale(self) -> None:
        """Has the real sampler say which tickets begin anew whole, and which samples alone."""
        bound = self.world.config.max_lag_steps if self.world.config.publish.when == "every" else None
        marks: Any = Marks()
        engine: Any = SimpleNamespace(version=self.version)
        sampler: Any = Sampler(engine, timeline=marks, max_lag_steps=bound)
        starts = {id_: [r.start_step for r in t.ended.values()] for id_, t in self.serving.items()}
        sampler._ended = {id_: min(steps) for id_, steps in starts.items() if steps}
        whole = list(getattr(sampler, "stale_tickets", ()))  # before there was this rule: none
        self.restart(whole)
        self.world.findings.restarted_tickets += len(whole)
        for id_, ticketed in self.serving.items():
            for index, request in ticketed.running.items():
                task = SimpleNamespace(cancel=functools.partial(self._restart_sample, ticketed, index, starts[id_]))
                sampler._running[f"{id_}.{index}"] = _EngineRequest(id_, request.start_step, cast(Any, task))
        sampler.restart_stale()

    def _restart_sample(self, ticketed: Ticketed, index: int, ended: list[int]) -> None:
        bound = self.world.config.max_lag_steps
        assert self.version is not None and bound is not None
        self.world.findings.restarts += 1
        self.world.findings.doomed_restarts += min(ended, default=self.version.step) < self.version.step - bound
        ticketed.running[index] = self._request()

    def sample(self) -> None:
        """Samples a few tokens of one request; it may end, its group may be handed in."""
        rng, version = self.world.rng, self.version
        ticketed = self.serving[rng.choice(sorted(self.serving))]
        if not ticketed.running or version is None:  # all that is left is to hand in
            self._hand_in(ticketed)
            return
        index = rng.choice(sorted(ticketed.running))
        request = ticketed.running[index]
        num_tokens = min(rng.randint(1, 4), request.length - len(request.versions))
        request.versions += [version] * num_tokens
        if len(request.versions) < request.length:
            return
        ticketed.ended[index] = ticketed.running.pop(index)
        num_losers = 0
        if len(ticketed.ended) == ticketed.ticket.num_samples:
            num_losers = len(ticketed.running)
            ticketed.running.clear()
        self.admission.finish_sample(ticketed.ticket.id, 1 + num_losers)
        if not ticketed.running and rng.random() < 0.8:  # else its reward takes a while
            self._hand_in(ticketed)

    def _hand_in(self, ticketed: Ticketed) -> None:
        world, ticket = self.world, ticketed.ticket
        del self.serving[ticket.id]
        self.admission.remove(ticket.id)
        if world.rng.random() < world.failing:
            if world.shared.renew(self.name, [ticket.id], lease_s=LEASE_S):
                world.shared.fail_ticket(ticket.id, "no verdict", max_attempts=MAX_ATTEMPTS)
            return
        members: dict[int, Member] = {}
        is_flat = world.rng.random() < 0.3  # without signal, for a filter
        for index, request in ticketed.ended.items():
            world.versions[request.number] = tuple(request.versions)
            sample = Sample(
                tokens=np.full(request.length, request.number, np.int32),
                logprobs=np.full(request.length, -0.5, np.float32),
                token_versions=tuple(request.versions),
                finish="stop",
            )
            reward = 0.0 if is_flat else float(request.number % 2)
            members[index] = (sample, RewardResult(reward=reward, scores=()), None)
        with contextlib.suppress(KeyError, UnfitGroupError):  # withdrawn, or another prompt by now
            try:
                world.shared.put_group(build_group(ticket, members, actor=self.name, started_s=0.0, finished_s=0.0))
            except FencedError:
                world.replace(self)

    def forget(self, ticket_id: str) -> None:
        """Aborts a ticket's requests; it is not held any more."""
        self.serving.pop(ticket_id, None)
        self.admission.remove(ticket_id)

    def follow_leases(self) -> None:
        """Renews what it holds, and aborts what was withdrawn or went to others."""
        held = [*self.serving, *(t.id for t in self.admission.waiting)]
        kept = self.world.shared.renew(self.name, held, lease_s=LEASE_S) if held else []
        for id_ in set(held) - set(kept):
            self.forget(id_)
