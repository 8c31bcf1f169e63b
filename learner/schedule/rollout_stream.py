"""`RolloutStream`: issues tickets, receives groups and yields packed micro-batches to the trainer.

It owns the state of a schedule: the store's learner side, the planner, the prompts, the group queue with its filter,
and the round timer. The main loop takes micro-batches from it and reports their outcome.
"""

import base64
import contextlib
import copy
import time
from collections.abc import Callable, Generator, Iterator, Set
from typing import Any, Protocol

from absl import logging

from bridge import codec
from bridge.rollout_types import Group, Sampling, Ticket, Version
from bridge.store.sql.learner_side import LearnerStore
from bridge.timeline import Timeline
from configs.schema import Config
from configs.sections import PackingConfig
from learner.data.problem import Problem
from learner.metrics.round_times import WaitingRatios
from learner.metrics.sample_record import PickedGroup, SamplePick
from learner.metrics.step_metrics import RewardMetrics
from learner.model.routing_replay import RoutingShape
from learner.objective.reward_shaping import has_learning_signal
from learner.schedule import group_validation
from learner.schedule.consume_groups import consume
from learner.schedule.frontier_width import FrontierWidth
from learner.schedule.group_filter import GroupFilter
from learner.schedule.group_queue import GroupQueue
from learner.schedule.round_planner import planner_of
from learner.schedule.sample_tickets import tickets_of
from learner.schedule.served_steps import ServedSteps
from learner.schedule.tail_batching import RaceCapacity
from learner.update.auto_shape import AutoShape
from learner.update.packing import MicroBatch


class Prompts(Protocol):
    """Endless training problems with a restorable position (`learner.data.prompt_stream.PromptStream`)."""

    def __next__(self) -> Problem: ...

    def observe(self, source: str, reward: float) -> None:
        """Records the mean reward of a group whose problem is from `source`."""
        ...

    def metrics(self) -> dict[str, float]:
        """Returns the prompt metrics of a step."""
        ...

    def get_state(self) -> dict[str, Any]:
        """Returns the position and the recorded rewards; JSON."""
        ...

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores the state that `get_state` returned."""
        ...


class RolloutStream:
    """Groups of a run, from the issue of their tickets to the checkpoint that contains them."""

    def __init__(
        self,
        config: Config,
        *,
        store: LearnerStore,
        prompts: Prompts,
        sampling: Sampling,
        timeline: Timeline,
        incarnation: int,
        vocab_size: int,
        routing: RoutingShape | None = None,
        step: int = 0,
        on_wait: Callable[[], None] = lambda: None,
        between_batches: Callable[[], None] = lambda: None,
        on_group: Callable[[Group], None] = lambda group: None,
    ) -> None:
        """Creates a stream that has issued and read nothing.

        Groups with token ids outside `vocab_size` are rejected. `routing` has the sizes of the routing that is
        replayed; None if it is not. `on_wait` is called on every poll that finds no group, `between_batches` between
        two micro-batches; both may raise. `on_group` is called with every group that is trained.
        """
        self._config, self._store, self._timeline = config, store, timeline
        self.prompts = prompts
        self._check_while_waiting, self._meanwhile, self._on_group = on_wait, between_batches, on_group
        self._incarnation = incarnation
        self.routing = routing
        """Sizes of the routing that batches hold; None without model.routing_replay."""
        self._limits = group_validation.GroupLimits(
            vocab_size=vocab_size,
            max_tokens=config.model.max_tokens,
            routing=routing,
            server_teachers=frozenset(config.loss.teacher_urls),
        )
        self._refusals = group_validation.RejectionCounter()
        self.planner = planner_of(config, sampling, lambda: next(prompts), incarnation=incarnation)
        self._tickets = tickets_of(store, config, self.planner.is_open)
        self.group_filter: GroupFilter[Group] = GroupFilter(
            config,
            planner=self.planner,
            ticket_store=self._tickets,
            has_signal=self._has_signal,
            check=self._check,
            on_filtered=lambda group: self.prompts.observe(*self._outcome(group)),
            restores=store.restores(),
            fenced_actors=store.fenced_actors(),
            step=step,
        )
        self._queue = iter(
            GroupQueue(
                config,
                planner=self.planner,
                store=store,
                tickets=self._tickets,
                group_filter=self.group_filter,
                timeline=timeline,
                on_wait=self._while_waiting,
            )
        )
        self._race_places = RaceCapacity(config, store)
        self._frontier_width = FrontierWidth(config, store, on_wait=self._while_waiting)
        self._served = ServedSteps(store, incarnation=incarnation, is_needed=config.max_lag_steps is not None)
        max_response_tokens = config.sampling.max_response_tokens
        self._tally = RewardMetrics(config.loss, max_response_tokens=max_response_tokens, routing=routing)
        self._shape = AutoShape(config)
        self._pick = SamplePick(
            groups_per_round=config.rounds.groups_per_round, kept_per_round=config.samples.groups_per_round
        )
        self.clock = WaitingRatios()
        self.num_dropped_updates = 0
        """Full updates that were discarded because a fresh batch was needed (`drop_update`)."""
        self.has_fenced_groups = False
        """True if a group of the update in progress is from an actor that was fenced since, also if it is re-admitted.
        """
        self._actors_in_update: dict[str, frozenset[str]] = {}
        """Actors of each group in the update in progress, by ticket."""
        self._observed: list[tuple[str, float]] = []
        """Source and mean reward of each group in the update in progress."""
        self._saving: dict[int, list[str]] = {}
        """Groups in each checkpoint that is not committed yet, by its step."""

    @property
    def step(self) -> int:
        """Optimizer steps made."""
        return self.group_filter.step

    @property
    def round(self) -> int:
        """Round in training, from 0."""
        return self.planner.round

    @property
    def fenced_actors(self) -> Set[str]:
        """Names of actors whose groups are rejected."""
        return self.group_filter.fenced_actors

    @property
    def packing(self) -> PackingConfig:
        """Current shape of a micro-batch."""
        return self._shape.packing

    @property
    def wait_s(self) -> float:
        """Seconds spent waiting for groups since the start."""
        return self._queue.wait_s

    def micro_batches(self) -> Iterator[MicroBatch]:
        """Issues tickets, waits for groups and yields packed micro-batches; endless.

        Tickets are issued before every wait. In round mode the next round therefore starts after the publish of the
        last update, under the published step.
        """
        while True:
            self.planner.served_step = self._served.step
            self.clock.rollout_started(time.monotonic())  # only the first call of a round counts
            self._offer(self.planner.issue(step=self.step, num_unclaimed=self._tickets.num_unclaimed))
            groups = next(self._queue)
            self.clock.arrived(time.monotonic(), self.planner.num_arrived_in_round)
            self.clock.dispatched(time.monotonic(), fills_update=len(groups) == self.planner.num_left_in_update)
            self._actors_in_update |= {g.ticket_id: g.actors for g in groups}
            for group in groups:
                self._observed.append(self._outcome(group))
                self._frontier_width.observe(group)
                self._on_group(group)
            yield from consume(self._config, self.planner, self._tally, self._shape, groups, self._pick, self.routing)

    def poll(self) -> None:
        """Reads arrivals without waiting, during computation: they may decide a race or empty the backlog."""
        self._queue.poll()
        self.clock.arrived(time.monotonic(), self.planner.num_arrived_in_round)
        self._top_up()
        self._meanwhile()

    def trained(self, start_s: float, end_s: float) -> None:
        """Records that the learner computed from `start_s` to `end_s` (monotonic seconds)."""
        self.clock.trained(start_s, end_s)

    @contextlib.contextmanager
    def aside(self, what: str) -> Generator[None]:
        """Excludes a block, such as a save, from the waiting ratios; `what` is its name in the event log."""
        start = time.monotonic()
        try:
            yield
        finally:
            end = time.monotonic()
            self.clock.exclude(end - start)
            self._timeline.took(what, start, end)

    def end_update(self) -> None:
        """Records that the full update was made: the learner's step advances, and the prompts learn its rewards."""
        for source, reward in self._observed:
            self.prompts.observe(source, reward)
        self._clear_update()
        self.group_filter.step += 1
        self.group_filter.fresh_from = None

    def take_rewards(self) -> dict[str, float]:
        """Returns the reward metrics of the update just made, and resets them."""
        return self._tally.take()

    def take_samples(self) -> list[PickedGroup]:
        """Returns the groups of the update just made that are kept as text."""
        return self._pick.take()

    def drop_update(self, *, needs_fresh: bool = True) -> None:
        """Discards the full update and reissues its tickets.

        With `needs_fresh`, only groups from the current weights are accepted until the next update is made. Tickets in
        progress on older weights are reissued immediately, since their groups would be rejected.
        """
        ids = [t.id for t in self.planner.reopen_update()]
        self._tally.clear()
        self._pick.clear()
        self._clear_update()
        self._queue.take_back(ids)
        self.group_filter.dropped["off_policy" if needs_fresh else "fenced"] += len(ids)
        if needs_fresh:
            self._queue.poll()
            self.group_filter.fresh_from = self.step
            tickets = self.planner.reissue_open(step=self.step, keep=self.group_filter.drop_older_than(self.step))
            self.num_dropped_updates += 1
        else:
            tickets = [self.planner.renew_one(id_) for id_ in ids]
        self._tickets.withdraw([t.id for t in tickets])
        self._tickets.put_tickets(tickets)

    def end_round(self) -> dict[str, float]:
        """Ends the round and returns its metrics."""
        self._race_places.look()
        tail = {"round/is_long": float(self.planner.round_is_long), "round/long_queue": len(self.planner.long_queue)}
        return self.clock.finish() | tail | self._frontier_width.end_round()

    def is_sound(self, group: Group, ticket: Ticket) -> bool:
        """Returns True if a group is valid for its ticket and run; fences actors after repeated invalid groups."""
        return self._objection(group, ticket) is None

    def fence(self, actor: str, reason: str, off_nats: float | None = None) -> None:
        """Fences an actor: rejects its groups and claims; other actors generate its untrained groups again.

        The caller drops the update in progress if it has groups of the actor (`has_fenced_groups`).
        `off_nats` is the error of its logprobs, in nats, if that is the reason.
        """
        logging.error("actor fenced actor=%s reason=%s", actor, reason)
        self._timeline.instant("fence", actor=actor, off=off_nats)
        self.has_fenced_groups |= any(actor in actors for actors in self._actors_in_update.values())
        taken = self._queue.remove(actor)
        trained = [id_ for id_ in self._queue.get_state()["unacknowledged"] if id_ not in self._actors_in_update]
        self._tickets.fence(actor, reason, trained=trained)
        self.group_filter.fence(actor, taken)

    def unfence(self, actor: str) -> None:
        """Lifts an actor's fence. None of its earlier samples remain."""
        self._timeline.instant("unfence", actor=actor)
        self.group_filter.fenced_actors.discard(actor)
        self._store.unfence(actor)

    def begin_save(self) -> dict[str, Any]:
        """Returns the stream's part of this step's checkpoint; `acknowledge` later deletes its groups.

        `encode_tickets` makes it JSON. Later updates do not change it.
        """
        state = self._queue.get_state()
        self._saving[self.step] = state["unacknowledged"]
        rest = {
            "planner": self.planner.get_state(),
            "prompts": self.prompts.get_state(),
            "queue": state,
            "packing": self._shape.get_state(),
            "frontier_width": self._frontier_width.get_state(),
        }
        tickets = {"open_tickets": self.planner.open_tickets, "long_queue": self.planner.long_queue}
        return copy.deepcopy(rest) | tickets

    def acknowledge(self, step: int | None) -> None:
        """Deletes the groups in the committed checkpoint of `step` from the store; None does nothing."""
        if step is not None:
            self._queue.acknowledge(self._saving[step])
            # This checkpoint also contains what an earlier, failed one would have contained.
            self._saving = {s: ids for s, ids in self._saving.items() if s > step}
            self._timeline.instant("checkpoint", step=step)

    def resume(self, saved: dict[str, Any] | None) -> None:
        """Restores the encoded state that `begin_save` returned and rolls the store back to it; None: to the start."""
        if saved is not None:
            tickets = _unpack(saved["open_tickets"])
            self.planner.set_state(saved["planner"], tickets, _unpack(saved["long_queue"]))
            self.prompts.set_state(saved["prompts"])
            self._queue.set_state(saved["queue"])
            self._shape.set_state(saved["packing"])
            # The checkpoint that contains these groups is committed, so the store may delete them.
            self._queue.acknowledge(saved["queue"]["unacknowledged"])
            self._tickets.put_tickets(tickets)
        self._frontier_width.resume(None if saved is None else saved["frontier_width"])
        self._store.withdraw_pinned()
        self._tickets.roll_back(
            [t.id for t in self.planner.open_tickets], next_order=self.planner.num_issued, step=self.step
        )

    def _offer(self, tickets: list[Ticket]) -> None:
        if tickets:
            self._tickets.put_tickets(tickets)
            self._timeline.instant("issue", tickets=len(tickets), step=self.step)

    def _top_up(self) -> None:
        self.planner.served_step = self._served.step
        self._offer(self.planner.top_up(step=self.step, num_unclaimed=self._tickets.num_unclaimed))

    def _while_waiting(self) -> None:
        self._check_while_waiting()
        self._top_up()
        for ticket_id, reason in self._tickets.failed().items():
            if self.planner.is_open(ticket_id):
                logging.error("ticket replaced ticket=%s reason=%s", ticket_id, reason)
                self.group_filter.replace_failed(ticket_id)

    def _clear_update(self) -> None:
        self._actors_in_update, self._observed, self.has_fenced_groups = {}, [], False

    def _outcome(self, group: Group) -> tuple[str, float]:
        """Returns source and mean reward of a group, which the prompts learn once it is trained or filtered.

        Not on its arrival: a group that waits during a checkpoint arrives again after a restart.
        """
        rewards = [r.reward for r in group.rollouts]
        return self.planner.source(group.ticket_id), sum(rewards) / len(rewards)

    def _has_signal(self, group: Group) -> bool:
        teacher = self.planner.ticket(group.ticket_id).task.teacher
        return has_learning_signal(
            group,
            self._config.loss,
            masks_truncated=self._config.prompts.truncated_responses == "mask",
            has_teacher=self._config.loss.teacher_number(teacher) > 0,
        )

    def _check(self, group: Group) -> str | None:
        return self._objection(group, self.planner.ticket(group.ticket_id))

    def _objection(self, group: Group, ticket: Ticket) -> str | None:
        """Returns why a group is invalid, or None; fences actors after repeated invalid groups."""
        newest = Version(incarnation=self._incarnation, step=self.step)
        found = group_validation.objection(group, ticket, self._limits, newest=newest)
        broken = self._refusals.add(group, found)
        if found is None:
            return None
        by, said = ",".join(sorted(found.actors)), group_validation.REASONS[found.reason]
        logging.error("group rejected ticket=%s actors=%s reason=%r", group.ticket_id, by, said)
        for actor in broken:
            self.fence(actor, f"its last {group_validation.MAX_REFUSED_IN_A_ROW} groups were invalid: {said}")
        return found.reason


def encode_tickets(saved: dict[str, Any]) -> dict[str, Any]:
    """Returns the state that `RolloutStream.begin_save` returned, as JSON values."""
    tickets = {name: saved[name] for name in ("open_tickets", "long_queue")}
    return saved | {name: [base64.b64encode(codec.encode(t)).decode() for t in ts] for name, ts in tickets.items()}


def _unpack(texts: list[str]) -> list[Ticket]:
    return [codec.decode(Ticket, base64.b64decode(t)) for t in texts]
