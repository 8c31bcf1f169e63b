"""The learner in virtual time: what `learner/loop.py` does, around the real round planner and round clock."""

import collections
import dataclasses
import math
from collections.abc import Callable

import numpy as np

from bridge.types import Task, Ticket
from configs.schema import Config
from launch.plan.calendar import Calendar
from launch.plan.outcome import Recorder
from launch.plan.profiles import Profile
from launch.plan.rollout import Rollout, ServedGroup
from learner.data.problems import Problem
from learner.schedule.planner import RoundPlanner, training_sampling
from learner.schedule.waiting_ratio import RoundClock


class Problems:
    """Problem n, for its number's sake."""

    def __init__(self) -> None:
        """Starts at 0."""
        self._next = 0

    def __call__(self) -> Problem:
        """The next one; its answer is its number."""
        number = str(self._next)
        self._next += 1
        return Problem(number, np.array([0], np.int32), Task(verifier="exact", answer=number))


@dataclasses.dataclass(frozen=True)
class Cost:
    """Seconds of training."""

    profile: Profile
    micro_batch_tokens: int

    def of(self, tokens: int) -> float:
        """Gradients of groups with so many tokens, packed together."""
        learner = self.profile.learner
        num_micro_batches = math.ceil(tokens / self.micro_batch_tokens)
        return tokens * learner.seconds_per_token / self.profile.num_learner_chips + (
            num_micro_batches * learner.micro_batch_s
        )


class SimLearner:
    """Issues, waits, trains, steps, publishes; one thing after the other."""

    def __init__(
        self,
        config: Config,
        profile: Profile,
        calendar: Calendar,
        recorder: Recorder,
        *,
        on_step: Callable[[int], None],
        last_step: int,
        seed: int,
    ) -> None:
        """Before its first turn. `on_step` is told each step made; the run ends with `last_step`."""
        self._config, self._profile, self._calendar, self._recorder = config, profile, calendar, recorder
        self._on_step, self._last_step = on_step, last_step
        self._planner = RoundPlanner(config, training_sampling(config, ()), Problems(), incarnation=0)
        self._clock = RoundClock()
        self._cost = Cost(
            profile, profile.learner.micro_batch_tokens or config.packing.rows * config.packing.row_tokens
        )
        self._rng = np.random.default_rng((seed, 7))
        self._rollout: Rollout
        self._ready: collections.deque[ServedGroup] = collections.deque()
        self._attempts: dict[str, int] = {}
        self._round_is_counted = False
        self._is_waiting = False
        self._is_fetching = False
        self._announced = 0
        self.step = 0
        """Optimizer steps made."""
        self.is_done = False
        """The last step was made, and what it was to publish is published."""

    def start(self, rollout: Rollout) -> None:
        """The first turn."""
        self._rollout = rollout
        self._turn()

    def on_group(self, group: ServedGroup) -> None:
        """A group is in the store; the learner takes it in at once, also while it computes."""
        self._take_in(group)
        if self._is_waiting:
            self._go_on()

    def _turn(self) -> None:
        """The learner's hands are free: it issues what is due, then takes what is there or waits for it."""
        tickets = self._planner.issue(step=self.step)
        if tickets:
            if self._clock.rollout_start_s is None:
                self._round_is_counted = self._recorder.is_on
            self._clock.rollout_started(self._calendar.now_s)
            self._rollout.offer(tickets)
        self._go_on()

    def _go_on(self) -> None:
        groups = self._next_groups()
        self._is_waiting = not groups
        if groups:
            self._train(groups)

    def _take_in(self, group: ServedGroup) -> None:
        """What `learner/schedule/group_queue.py` does with a group that arrives."""
        id_ = group.ticket.id
        if not self._planner.is_open(id_):
            self._recorder.dropped_group("unwanted")
        elif self._is_stale(group):
            self._reissue(group.ticket, "stale")
        elif self._teaches_nothing() and self._planner.may_replace:
            self._recorder.dropped_group("zero_variance")
            self._rollout.offer([self._planner.replace(id_)])
        else:
            self._ready.append(group)
            self._rollout.withdraw([t.id for t in self._planner.arrive(id_)])
        most = self._config.max_ready_groups
        while most is not None and len(self._ready) > most:
            self._reissue(self._ready.popleft().ticket, "overflow")

    def _is_stale(self, group: ServedGroup) -> bool:
        bound = self._config.rounds.max_lag_steps
        return bound is not None and self.step - group.min_step > bound

    def _teaches_nothing(self) -> bool:
        return self._config.rounds.filter_zero_variance and self._rng.random() < self._profile.zero_variance_groups

    def _next_groups(self) -> list[ServedGroup]:
        """The groups to train now; none if they are not there yet."""
        rounds = self._config.rounds
        if rounds.train_start == "round_complete" and self._planner.num_left_in_round == rounds.groups_per_round:
            if len(self._ready) < rounds.groups_per_round:
                return []
            self._ready = collections.deque(sorted(self._ready, key=lambda g: g.ticket.order))
        groups = []
        while self._ready and len(groups) < self._planner.num_left_in_update:
            group = self._ready.popleft()
            if self._is_stale(group):
                self._reissue(group.ticket, "stale")
            else:
                groups.append(group)
        return groups

    def _reissue(self, ticket: Ticket, reason: str) -> None:
        self._recorder.dropped_group(reason)
        self._attempts[ticket.id] = self._attempts.get(ticket.id, 0) + 1
        self._rollout.offer([ticket], attempt=self._attempts[ticket.id])

    def _train(self, groups: list[ServedGroup]) -> None:
        done = None
        for group in groups:
            done = self._planner.consume(group.ticket.id)
            self._attempts.pop(group.ticket.id, None)
            self._recorder.trained(self.step, group.tokens_by_step, group.ticket.num_samples, group.response_tokens)
        assert done is not None
        took = self._cost.of(sum(g.tokens for g in groups))
        took += self._profile.learner.optimizer_step_s * done.ends_update
        now_s = self._calendar.now_s
        self._clock.trained(now_s, now_s + took)
        self._recorder.computed(took)
        self._calendar.at(now_s + took, self._trained, done.ends_update, done.ends_round)

    def _trained(self, ends_update: bool, ends_round: bool) -> None:
        publish = self._config.publish
        if not ends_update:
            self._turn()
            return
        self.step += 1
        self._on_step(self.step)
        if ends_round if publish.when == "round_end" else self.step % publish.every_n_steps == 0:
            at_s = self._calendar.now_s + self._profile.publish.export_s
            self._calendar.at(at_s, self._published, ends_round)
        else:
            self._end_step(ends_round)

    def _published(self, ends_round: bool) -> None:
        self._announced = self.step
        if not self._is_fetching:
            self._fetch()
        self._end_step(ends_round)

    def _end_step(self, ends_round: bool) -> None:
        if ends_round:
            metrics = self._clock.finish(self._calendar.now_s)
            if self._round_is_counted:
                self._recorder.rounds.append(metrics)
        if self.step == self._last_step:
            self.is_done = True
        else:
            self._turn()

    def _fetch(self) -> None:
        self._is_fetching = True
        at_s = self._calendar.now_s + self._profile.publish.prefetch_s
        self._calendar.at(at_s, self._fetched, self._announced)

    def _fetched(self, step: int) -> None:
        """The actors have the weights of `step`; if newer ones were announced meanwhile, those are next."""
        self._is_fetching = False
        self._rollout.update(step)
        if self._announced > step:
            self._fetch()
