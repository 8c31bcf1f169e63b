"""Decides when the helper's engines give their devices up, from reports of actors and learner."""

import collections
import time
from collections.abc import Callable

import numpy as np

from bridge.heartbeat_types import ActorReport, Heartbeat
from bridge.rollout_types import Group
from configs.schema import Config
from learner.metrics.round_times import WaitingRatios
from learner.schedule.scale_down_criteria import HEADROOM, HelperCosts, RoundCost, ScaleDown, pays, would_fit

MAX_LENGTHS = 4096
"""Responses of a kind of round whose lengths are remembered, the last ones."""


class ScaleDownPolicy:
    """Decision of one round after another: Algorithm 1's criteria, and whether it pays."""

    def __init__(
        self,
        config: Config,
        *,
        num_own_devices: int,
        num_helper_devices: int,
        heartbeats: Callable[[], list[Heartbeat]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Starts without a round.

        `num_own_devices` is 0 if the learner shares its devices with the engines (actor.colocated). `heartbeats`
        returns those of the live actors.
        """
        self._config, self._heartbeats, self._clock = config, heartbeats, clock
        self._num_own, self.num_helping = num_own_devices, num_helper_devices
        first = config.actor.num_engines - config.helpers.num_engines
        self._helper_roles = {f"actor-{i}" for i in range(first, config.actor.num_engines)}
        self._lengths: dict[bool, collections.deque[tuple[int, int]]] = {
            is_long: collections.deque(maxlen=MAX_LENGTHS) for is_long in (False, True)
        }
        self._last: dict[bool, RoundCost] = {}
        self._start_s = self._hand_over_s = 0.0
        self._begin_round()

    def _begin_round(self) -> None:
        self._progress = ScaleDown(num_requests=self._config.rounds.groups_per_round)
        self.released_at = 0.0
        """Fraction of the round's groups that were complete when its engines gave their devices up; 0 if not yet."""

    def observe(self, group: Group, *, is_long: bool) -> None:
        """Remembers the lengths of a group's responses."""
        num_prompt = group.prompt_tokens.size
        self._lengths[is_long].extend((num_prompt, r.tokens.size) for r in group.rollouts)

    def is_due(self, num_arrived: int, times: WaitingRatios, *, is_long: bool) -> bool:
        """Returns True if the engines should give their devices up now; `num_arrived` groups are complete."""
        progress, num_groups = self._progress, self._config.rounds.groups_per_round
        is_try = any([progress.is_due() for _ in range(progress.num_completed, num_arrived)])
        if progress.is_done:
            return False
        if at := self._config.helpers.release_at:
            is_due = at * num_groups <= num_arrived < num_groups
        else:
            is_due = is_try and self._pays(times, is_long) and self._fits(is_long)
        if is_due:
            progress.is_done, self.released_at = True, num_arrived / num_groups
        return is_due

    def is_due_at_end(self, times: WaitingRatios, *, is_long: bool) -> bool:
        """Returns True if the engines should give their devices up for what is left to train after the rollout."""
        if self._progress.is_done or not (self._config.helpers.release_at or self._pays(times, is_long)):
            return False
        self._progress.is_done, self.released_at = True, 1.0
        return True

    def end_round(
        self, times: WaitingRatios, *, is_long: bool, start_s: float, hand_over_s: float, helper_s: float
    ) -> None:
        """Remembers what the round cost.

        Args:
          times: times of the round, before they are reset.
          start_s: seconds until the helper had its devices and the parameters, or until the round ended without it; 0
            if it was not asked.
          hand_over_s: seconds until its sum was merged; 0 if it did not help.
        """
        if hand_over_s:
            self._start_s, self._hand_over_s = start_s, hand_over_s
        else:
            self._start_s = max(self._start_s, start_s)
        if times.rollout_start_s is not None and times.last_arrival_s is not None:
            self._last[is_long] = RoundCost(
                rollout_s=times.last_arrival_s - times.rollout_start_s,
                device_s=times.compute_s * max(1, self._num_own) + helper_s * self.num_helping,
            )
        self._begin_round()

    def _pays(self, times: WaitingRatios, is_long: bool) -> bool:
        if times.rollout_start_s is None:
            return False
        wakes_s = [beat.report.wake_s or 0.0 for beat in self._heartbeats() if beat.report is not None]
        return pays(
            self._last.get(is_long),
            HelperCosts(start_s=self._start_s, hand_over_s=self._hand_over_s, wake_s=max(wakes_s, default=0.0)),
            num_own=self._num_own,
            num_helping=self.num_helping,
            now_s=self._clock() - times.rollout_start_s,
            first_s=None if times.train_start_s is None else times.train_start_s - times.rollout_start_s,
        )

    def _fits(self, is_long: bool) -> bool:
        """Returns True if the other engines' KV cache holds what runs: now, and at its projected peak."""
        beats = [(beat.process, beat.report) for beat in self._heartbeats() if beat.version is not None]
        reports = [report for _, report in beats if report is not None]
        staying = [r for name, r in beats if r is not None and name.split("-r")[0] not in self._helper_roles]
        if not staying:
            return False
        kv_tokens = sum(report.kv_tokens for report in staying)
        # What still runs is long, so the peak is that of the longer half of the lengths in rounds of this kind.
        by_length = sorted(self._lengths[is_long], key=lambda pair: pair[1])
        longer = np.array(by_length[len(by_length) // 2 :], np.int32).reshape(-1, 2)
        if kv_tokens and sum(map(_cached_tokens, reports)) > HEADROOM * kv_tokens:
            return False
        return would_fit(longer, sum(r.num_running + r.num_engine_waiting for r in reports), kv_tokens)


def _cached_tokens(report: ActorReport) -> float:
    return report.kv_usage * report.kv_tokens
