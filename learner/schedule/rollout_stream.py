"""`RolloutStream`: tickets out, groups in, packed micro-batches to the trainer.

Owns all that a schedule is made of: the store's learner side, the planner's books, the prompts, the queue with its
arrival policy, and the round's clock. The main loop takes micro-batches from it and tells it what became of them.
"""

import base64
import contextlib
import time
from collections.abc import Callable, Generator, Iterator, Sequence, Set
from typing import Any, Protocol

import numpy as np
from absl import logging
from jaxtyping import Float32

from bridge import codec
from bridge.rollout_types import Group, Sampling, Ticket, Version
from bridge.store.sql.learner_side import LearnerStore
from bridge.timeline import Timeline
from configs.schema import Config
from configs.sections import PackingConfig
from learner.data.problem import Problem
from learner.metrics.sample_record import PickedGroup, SamplePick
from learner.metrics.step_metrics import RewardMetrics
from learner.metrics.step_timer import WaitingRatios
from learner.objective.reward_shaping import has_learning_signal
from learner.schedule import group_validation
from learner.schedule.group_filter import GroupFilter
from learner.schedule.group_queue import GroupQueue
from learner.schedule.round_planner import planner_of
from learner.schedule.sample_tickets import tickets_of
from learner.schedule.served_steps import ServedSteps
from learner.schedule.tail_batching import RaceCapacity
from learner.schedule.ticket_ledger import TicketLedger
from learner.update.auto_shape import AutoShape
from learner.update.packing import MicroBatch, pack_groups


def consume(
    config: Config,
    planner: TicketLedger,
    tally: RewardMetrics,
    shape: AutoShape,
    groups: Sequence[Group],
    pick: SamplePick,
) -> list[MicroBatch]:
    """Books groups of one update as trained, what they earned, and which are kept as text; packs them.

    All groups of the update that are there are packed together, into as many micro-batches as they fill. RolloutPipe's
    feasible batch selector takes the whole groups that fit one micro-batch instead, which leaves up to a group's worth
    of it empty: 1.18 computed tokens a real one over fifty updates of 64 groups, against 1.02.
    """
    num_trained = config.rounds.groups_per_round - planner.num_left_in_round
    picked = {g.ticket_id: planner.ticket(g.ticket_id) for i, g in enumerate(groups) if pick.wants(num_trained + i)}
    sources = {ticket_id: planner.source(ticket_id) for ticket_id in picked}

    def keep(group: Group, advantages: list[Float32[np.ndarray, " T"]]) -> None:
        if ticket := picked.get(group.ticket_id):
            source = sources[group.ticket_id]
            pick.book(PickedGroup(group=group, task=ticket.task, source=source, advantages=advantages))

    for group in groups:
        tally.add(group, planner.ticket(group.ticket_id).task)
    done = [planner.consume(group.ticket_id) for group in groups]
    return pack_groups(
        groups,
        packing=shape.choose(groups, ends_update=done[-1].ends_update),
        loss=config.loss,
        max_response_tokens=config.sampling.max_response_tokens,
        masks_truncated=config.prompts.truncated_responses == "mask",
        ends_update=done[-1].ends_update,
        ends_round=done[-1].ends_round,
        on_group=keep,
    )


class Prompts(Protocol):
    """Training problems without end, whose place can be kept (`learner.data.prompt_stream.PromptStream`)."""

    def __next__(self) -> Problem: ...

    def observe(self, source: str, reward: float) -> None:
        """Takes in the mean reward of a group whose problem was of `source`."""
        ...

    def metrics(self) -> dict[str, float]:
        """What a step's row says of them."""
        ...

    def get_state(self) -> dict[str, Any]:
        """Their place, and what came of `observe`; JSON."""
        ...

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes to where `get_state` was called."""
        ...


class RolloutStream:
    """A run's groups, from the tickets that ask for them to the checkpoint that contains them."""

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
        step: int = 0,
        on_wait: Callable[[], None] = lambda: None,
        between_batches: Callable[[], None] = lambda: None,
    ) -> None:
        """Nothing is issued or read yet.

        Args:
          config: the run's.
          store: where tickets go and groups come from.
          prompts: what is asked.
          sampling: how training responses are sampled.
          timeline: where issues, decided races and checkpoints are marked.
          incarnation: the learner's.
          vocab_size: the model's; groups with other token ids are refused.
          step: the learner's.
          on_wait: called on every look that found no group; may raise.
          between_batches: called between two micro-batches; may raise.
        """
        self._config, self._store, self._timeline = config, store, timeline
        self._tickets = tickets_of(store, config)
        self.prompts = prompts
        self._check_while_waiting, self._meanwhile = on_wait, between_batches
        self._incarnation = incarnation
        self._limits = group_validation.GroupLimits(vocab_size=vocab_size, max_tokens=config.model.max_tokens)
        self._refusals = group_validation.RejectionCounter()
        self.planner = planner_of(config, sampling, lambda: next(prompts), incarnation=incarnation)
        self.group_filter: GroupFilter[Group] = GroupFilter(
            config,
            planner=self.planner,
            ticket_store=self._tickets,
            has_signal=lambda group: has_learning_signal(
                group, config.loss, masks_truncated=config.prompts.truncated_responses == "mask"
            ),
            check=self._check,
            on_filtered=self._observe,
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
        self._served = ServedSteps(store, incarnation=incarnation, is_needed=config.max_lag_steps is not None)
        self._tally = RewardMetrics(config.loss, max_response_tokens=config.sampling.max_response_tokens)
        self._shape = AutoShape(config)
        self._pick = SamplePick(
            groups_per_round=config.rounds.groups_per_round, kept_per_round=config.samples.groups_per_round
        )
        self.clock = WaitingRatios()
        self.num_dropped_updates = 0
        """Full updates that were not made (`drop_update`)."""
        self._saving: dict[int, list[str]] = {}
        """Groups that each checkpoint in the making contains, by its step."""

    @property
    def step(self) -> int:
        """Optimizer steps made."""
        return self.group_filter.step

    @property
    def round(self) -> int:
        """The round now being trained, from 0."""
        return self.planner.round

    @property
    def fenced_actors(self) -> Set[str]:
        """Names of actors whose groups are refused."""
        return self.group_filter.fenced_actors

    @property
    def packing(self) -> PackingConfig:
        """The shape of a micro-batch now."""
        return self._shape.packing

    @property
    def wait_s(self) -> float:
        """Seconds spent waiting for groups since the start."""
        return self._queue.wait_s

    def micro_batches(self) -> Iterator[MicroBatch]:
        """Issues tickets, waits for groups and packs them; endless.

        Tickets are issued before every wait, so by rounds the next round starts only once the caller comes
        back from the last update's publish, and then under the step it published.
        """
        while True:
            self.planner.served_step = self._served.step
            self.clock.rollout_started(time.monotonic())  # of a round only the first call counts
            self._offer(self.planner.issue(step=self.step, num_unclaimed=self._tickets.num_unclaimed))
            groups = next(self._queue)
            self.clock.dispatched(time.monotonic(), fills_update=len(groups) == self.planner.num_left_in_update)
            for group in groups:
                self._observe(group)
            yield from consume(self._config, self.planner, self._tally, self._shape, groups, self._pick)

    def poll(self) -> None:
        """Looks for arrivals without waiting, while the learner computes: a race may be decided, a window run dry."""
        self._queue.poll()
        self._top_up()
        self._meanwhile()

    def trained(self, start_s: float, end_s: float) -> None:
        """The learner computed from `start_s` to `end_s` (monotonic seconds)."""
        self.clock.trained(start_s, end_s)

    @contextlib.contextmanager
    def aside(self, what: str) -> Generator[None]:
        """Around what is neither waiting for groups nor training: publishing, saving, waiting for a probe.

        `what` is its name in the event log; the waiting ratios leave its time out.
        """
        start = time.monotonic()
        try:
            yield
        finally:
            end = time.monotonic()
            self.clock.exclude(end - start)
            self._timeline.took(what, start, end)

    def end_update(self) -> None:
        """The update that was full is made: the learner is a step on."""
        self.group_filter.step += 1
        self.group_filter.fresh_from = None

    def take_rewards(self) -> dict[str, float]:
        """What the responses of the update just made earned, as metrics; the next update's count anew."""
        return self._tally.take()

    def take_samples(self) -> list[PickedGroup]:
        """Groups of the update just made that are kept as text."""
        return self._pick.take()

    def drop_update(self) -> None:
        """The update that was full is not made; only groups by the current weights are taken until the next one is.

        All that is in progress on older weights is asked for anew at once: it would be turned away in the end.
        """
        ids = [t.id for t in self.planner.reopen_update()]
        self._tally.clear()
        self._pick.clear()
        self._queue.take_back(ids)
        self.group_filter.dropped["off_policy"] += len(ids)
        self._queue.poll()
        self.group_filter.fresh_from = self.step
        tickets = self.planner.reissue_open(step=self.step, keep=self.group_filter.drop_older_than(self.step))
        self._tickets.withdraw([t.id for t in tickets])
        self._tickets.put_tickets(tickets)
        self.num_dropped_updates += 1

    def end_round(self) -> dict[str, float]:
        """The round's metrics."""
        self._race_places.look()
        tail = {"round/is_long": float(self.planner.round_is_long), "round/long_queue": len(self.planner.long_queue)}
        return self.clock.finish() | tail

    def is_sound(self, group: Group, ticket: Ticket) -> bool:
        """Whether nothing in a group that came for a ticket contradicts the run; who makes no other is fenced."""
        return self._objection(group, ticket) is None

    def fence(self, actor: str, reason: str, off_nats: float | None = None) -> None:
        """Refuses an actor's groups and claims from now on; what it holds or made goes to others.

        `off_nats`: by how much its logprobs are off, if it is fenced for that.
        """
        logging.error("actor fenced actor=%s reason=%s", actor, reason)
        self._timeline.instant("fence", actor=actor, off=off_nats)
        self._tickets.fence(actor, reason)
        self.group_filter.fence(actor)

    def unfence(self, actor: str) -> None:
        """Lets an actor in again; it has nothing left of what it sampled before."""
        self._timeline.instant("unfence", actor=actor)
        self.group_filter.fenced_actors.discard(actor)
        self._store.unfence(actor)

    def begin_save(self) -> dict[str, Any]:
        """The stream's part of the checkpoint of this step; JSON. Its groups go once that is committed."""
        state = self._queue.get_state()
        self._saving[self.step] = state["unacknowledged"]
        return {
            "planner": self.planner.get_state(),
            "open_tickets": _pack(self.planner.open_tickets),
            "long_queue": _pack(self.planner.long_queue),
            "prompts": self.prompts.get_state(),
            "queue": state,
            "packing": self._shape.get_state(),
        }

    def acknowledge(self, step: int | None) -> None:
        """Lets the store forget the groups that the committed checkpoint of `step` contains; None: there is none."""
        if step is not None:
            self._queue.acknowledge(self._saving[step])
            # What an earlier one that failed contains, this one contains too.
            self._saving = {s: ids for s, ids in self._saving.items() if s > step}
            self._timeline.instant("checkpoint", step=step)

    def resume(self, saved: dict[str, Any] | None) -> None:
        """Goes to where `begin_save` was called, the store with it; None: to the start."""
        if saved is not None:
            tickets = _unpack(saved["open_tickets"])
            self.planner.set_state(saved["planner"], tickets, _unpack(saved["long_queue"]))
            self.prompts.set_state(saved["prompts"])
            self._queue.set_state(saved["queue"])
            self._shape.set_state(saved["packing"])
            # The checkpoint that contains these groups is committed, so they may go now if they are still there.
            self._queue.acknowledge(saved["queue"]["unacknowledged"])
            self._tickets.put_tickets(tickets)
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

    def _observe(self, group: Group) -> None:
        """Tells the prompts what a group earned that is trained, or that teaches nothing: each group once.

        Not when it arrives: a group that waits while a checkpoint is made arrives again after a restart.
        """
        rewards = [r.reward for r in group.rollouts]
        self.prompts.observe(self.planner.source(group.ticket_id), sum(rewards) / len(rewards))

    def _check(self, group: Group) -> str | None:
        return self._objection(group, self.planner.ticket(group.ticket_id))

    def _objection(self, group: Group, ticket: Ticket) -> str | None:
        """Why a group that arrives can't be right; fences an actor that makes nothing else."""
        newest = Version(incarnation=self._incarnation, step=self.step)
        found = group_validation.objection(group, ticket, self._limits, newest=newest)
        broken = self._refusals.add(group, found)
        if found is None:
            return None
        by, said = ",".join(sorted(found.actors)), group_validation.REASONS[found.reason]
        logging.error("group refused ticket=%s actors=%s reason=%r", group.ticket_id, by, said)
        for actor in broken:
            self.fence(actor, f"none of its last {group_validation.MAX_REFUSED_IN_A_ROW} groups can be right: {said}")
        return found.reason


def _pack(tickets: list[Ticket]) -> list[str]:
    return [base64.b64encode(codec.encode(t)).decode() for t in tickets]


def _unpack(texts: list[str]) -> list[Ticket]:
    return [codec.decode(Ticket, base64.b64decode(t)) for t in texts]
