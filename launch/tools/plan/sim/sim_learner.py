"""Simulated learner: steps, updates, publishing, and shared chips."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from bridge.rollout_types import Task, Ticket
from configs.schema import Config
from launch.tools.plan.control_plane.transfers import Transfers
from launch.tools.plan.profile import Profile
from launch.tools.plan.sim.actors import SimActors
from launch.tools.plan.sim.chips import Compute, Cost
from launch.tools.plan.sim.event_queue import EventQueue, SimRecorder
from launch.tools.plan.sim.fleet import ServedGroup
from launch.tools.plan.sim.gradient_helpers import SimHelpers
from learner.data.problem import Problem
from learner.metrics.round_times import WaitingRatios
from learner.schedule.group_filter import GroupFilter, TrainingOrder
from learner.schedule.round_planner import planner_of
from learner.schedule.ticket_ledger import TicketLedger, training_sampling


class SimPublish(NamedTuple):
    """A published version."""

    step: int
    number: int
    """Sequence number of the publish; the initial weights are 0."""
    at_s: float
    """Time at which the learner had exported it."""


class SimUpdates:
    """Weight updates in flight: one fetch at a time, then the newest version."""

    def __init__(self, config: Config, profile: Profile, calendar: EventQueue, take: Callable[[int], None]) -> None:
        """Starts with weights of step 0 on the engines; `take(step)` loads a version."""
        self._profile, self._calendar, self._take = profile, calendar, take
        self._transfers = Transfers.of(config, profile)
        self._newest = self._held = SimPublish(0, 0, 0.0)
        self._is_fetching = False
        self._num_taken, self._spent_s = 0, 0.0

    @property
    def mean_s(self) -> float:
        """Mean seconds from a version's export until engines serve it."""
        return self._spent_s / max(1, self._num_taken)

    def publish(self, step: int) -> None:
        """Publishes the exported weights of `step`."""
        self._newest = SimPublish(step, self._newest.number + 1, self._calendar.now_s)
        if not self._is_fetching:
            self._fetch(self._newest)

    def _fetch(self, version: SimPublish) -> None:
        self._is_fetching = True
        now_s, fetch_s = self._calendar.now_s, self._profile.publish.prefetch_s
        if self._transfers is not None:
            # Learner hosts may have written it while the previous version was fetched.
            fetch_s += max(0.0, version.at_s + self._transfers.announce_s(version.number) - now_s)
            num_bytes = self._transfers.num_bytes(version.number, held=self._held.number)
            fetch_s += self._transfers.download_s(num_bytes)
        self._calendar.at(now_s + fetch_s, self._fetched, version)

    def _fetched(self, version: SimPublish) -> None:
        self._is_fetching = False
        self._held = version
        self._num_taken += 1
        self._spent_s += self._calendar.now_s + self._profile.publish.pause_s - version.at_s
        self._take(version.step)
        if self._newest is not version:
            self._fetch(self._newest)


class SimProblems:
    """Endless source of numbered problems."""

    def __init__(self) -> None:
        self._next = 0

    def __call__(self) -> Problem:
        """Returns the next problem, whose answer is its number."""
        number = str(self._next)
        self._next += 1
        return Problem(number, np.array([0], np.int32), Task.judged_by("exact", answer=number))


class SimTicketStore:
    """Store interface of the arrival policy, backed by the simulated engines."""

    def __init__(self, rollout: SimActors, planner: TicketLedger) -> None:
        self._rollout, self._planner = rollout, planner
        self._attempts: dict[str, int] = {}

    def put_tickets(self, tickets: Iterable[Ticket]) -> None:
        """Issues tickets."""
        self._rollout.offer(list(tickets))

    def reissue(self, ticket_ids: Sequence[str], *, older_than: int | None = None) -> None:
        """Reissues open tickets; each attempt draws other lengths."""
        for id_ in ticket_ids:
            self._attempts[id_] = self._attempts.get(id_, 0) + 1
            self._rollout.offer_again(self._planner.ticket(id_), attempt=self._attempts[id_], older_than=older_than)

    def withdraw(self, ticket_ids: Sequence[str]) -> None:
        """Ends tickets that are no longer needed."""
        self._rollout.withdraw(list(ticket_ids))

    def acknowledge(self, ticket_ids: Sequence[str]) -> None:
        """Marks groups as trained."""
        for id_ in ticket_ids:
            self._attempts.pop(id_, None)
            self._rollout.acknowledge(id_)


class SimLearner:
    """Simulated learner, which sequentially issues, waits, trains, steps and publishes."""

    def __init__(
        self,
        config: Config,
        profile: Profile,
        calendar: EventQueue,
        recorder: SimRecorder,
        *,
        on_step: Callable[[int], None],
        last_step: int,
        seed: int,
    ) -> None:
        """Prepares the learner; `on_step` is called per optimizer step, and the run ends after `last_step`."""
        self._config, self._profile, self._calendar, self._recorder = config, profile, calendar, recorder
        self._on_step, self._last_step = on_step, last_step
        self._planner = planner_of(config, training_sampling(config, ()), SimProblems(), incarnation=0)
        self._clock = WaitingRatios()
        micro_batch_tokens = profile.learner.micro_batch_tokens or config.packing.rows * config.packing.row_tokens
        self._compute = Compute(Cost(profile.learner, micro_batch_tokens), calendar, epochs=config.rounds.epochs)
        self._rng = np.random.default_rng((seed, 7))
        self._rollout: SimActors
        self._ticket_store: SimTicketStore
        self._group_filter: GroupFilter[ServedGroup]
        self._order: TrainingOrder[ServedGroup]
        self._round_is_counted = False
        self._is_waiting = False
        self._helpers = SimHelpers(profile, calendar)
        self.updates = SimUpdates(config, profile, calendar, lambda step: self._rollout.update(step))
        """Versions in flight to the engines."""
        self.is_done = False
        """True once the last step is made and published."""

    @property
    def step(self) -> int:
        """Number of optimizer steps."""
        return self._group_filter.step

    @property
    def dropped(self) -> Mapping[str, int]:
        """Number of groups not trained, by reason."""
        return self._group_filter.dropped

    def start(self, rollout: SimActors) -> None:
        """Starts the first turn."""
        self._rollout, self._ticket_store = rollout, SimTicketStore(rollout, self._planner)
        self._group_filter = GroupFilter(
            self._config, planner=self._planner, ticket_store=self._ticket_store, has_signal=self._has_signal
        )
        self._order = TrainingOrder(self._config, self._planner, self._group_filter.take)
        self._turn()

    def on_claim(self) -> None:
        """Tops up tickets after a claim, also while computing."""
        self._planner.served_step = self._rollout.served_step
        self._rollout.offer(self._planner.top_up(step=self.step, num_unclaimed=self._num_unclaimed))

    def on_group(self, group: ServedGroup) -> None:
        """Receives a stored group, also while computing."""
        self._group_filter.receive(group)
        self._group_filter.drop_oldest()
        if self._is_waiting:
            self._go_on()

    def pays(self, num_chips: int) -> bool:
        """Returns True if the round is expected to end sooner with the help of this many chips from now on."""
        return self._helpers.pays(num_chips, self._clock, is_long=self._planner.round_is_long)

    def on_free_chips(self) -> None:
        """Uses chips that the engines have released."""
        if self._rollout.is_over:
            self._helpers.rollout_ended(self._clock)
        if self._profile.helpers is not None and self._profile.num_learner_chips:
            waiting = sum(g.tokens for g in self._group_filter.waiting)
            left_s = self._compute.left_s + self._helpers.alone_s(waiting)
            if not self._helpers.join(self._rollout.num_free_chips, left_s=left_s, is_over=self._rollout.is_over):
                return
            self._compute.hand_over_s = self._profile.helpers.hand_over_s
        if self._is_waiting:
            self._go_on()
        elif num_chips := self._num_chips:
            self._compute.spread(num_chips)

    @property
    def _num_chips(self) -> int:
        own = self._profile.num_learner_chips
        return own + self._helpers.num_chips if own else self._rollout.num_free_chips

    def _turn(self) -> None:
        if self._clock.rollout_start_s is None:
            self._round_is_counted = self._recorder.is_on
        self._clock.rollout_started(self._calendar.now_s)
        self._planner.served_step = self._rollout.served_step
        self._rollout.offer(self._planner.issue(step=self.step, num_unclaimed=self._num_unclaimed))
        self._go_on()

    def _num_unclaimed(self) -> int:
        return self._rollout.num_unclaimed

    def _go_on(self) -> None:
        groups = self._order.next_groups() if self._num_chips else []
        self._is_waiting = not groups
        if groups:
            self._train(groups)

    def _has_signal(self, group: ServedGroup) -> bool:
        del group  # simulated groups have no rewards
        return self._rng.random() >= self._profile.zero_variance_groups

    def _train(self, groups: list[ServedGroup]) -> None:
        fills_update = len(groups) == self._planner.num_left_in_update
        self._clock.dispatched(self._calendar.now_s, fills_update=fills_update)
        done = None
        for group in groups:
            done = self._planner.consume(group.ticket_id)
            self._recorder.trained(self.step, group.tokens_by_step, group.ticket.num_samples, group.response_tokens)
            self._helpers.trained(group.tokens)
        self._ticket_store.acknowledge([g.ticket_id for g in groups])
        assert done is not None
        self._compute.start(
            sum(g.tokens for g in groups),
            ends_update=done.ends_update,
            num_chips=self._num_chips,
            then=functools.partial(self._computed, done.ends_update, done.ends_round),
        )

    def _computed(self, ends_update: bool, ends_round: bool, start_s: float) -> None:
        now_s = self._calendar.now_s
        self._clock.trained(start_s, now_s)
        self._recorder.computed(now_s - start_s)
        self._trained(ends_update, ends_round)

    def _trained(self, ends_update: bool, ends_round: bool) -> None:
        publish = self._config.publish
        if not ends_update:
            self._turn()
            return
        self._group_filter.step += 1
        self._on_step(self.step)
        wake_s = self._helpers.leave(is_colocated=not self._profile.num_learner_chips)
        self._compute.hand_over_s = 0.0
        if ends_round if publish.when == "round_end" else self.step % publish.every_n_steps == 0:
            at_s = self._calendar.now_s + self._profile.publish.export_s + wake_s
            self._clock.exclude(self._profile.publish.export_s)
            self._calendar.at(at_s, self._published, ends_round)
        else:
            self._end_step(ends_round)

    def _published(self, ends_round: bool) -> None:
        self.updates.publish(self.step)
        self._end_step(ends_round)

    def _end_step(self, ends_round: bool) -> None:
        if ends_round:
            self._helpers.end_round(is_long=self._planner.round_is_long)
            metrics = self._clock.finish()
            if self._round_is_counted:
                self._recorder.rounds.append(metrics)
        if self.step == self._last_step:
            self.is_done = True
        else:
            self._turn()
