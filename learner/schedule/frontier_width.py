"""Choice of the frontier's width F_w: the fewest groups in service with which the engines keep their full speed.

RolloutPipe (section 3.3, eq. 5-6) orders groups more strictly the fewer are in service, and sets F_w = U. An engine
that is faster with more than F_w K sequences then loses more speed than the order gains. F_w is therefore the smallest
width of at least U groups, which an update needs, with

    tokens/s with F_w groups in service >= 0.97 tokens/s with all groups of the round in service.

F_w groups run F_w K sequences only at first, fewer while their last responses finish. Both speeds are therefore means
over a replay of a round's response lengths. T(h), the tokens/s of all engines with h sequences, is measured by the
engines in the first round, in which all groups are in service. The planner takes it from a profile
(`launch/tools/plan/frontier.py`).
"""

import heapq
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from absl import logging

from bridge.heartbeat_types import ActorReport, DecodeSpeed
from bridge.rollout_types import Group
from bridge.store.sql.learner_side import LearnerStore
from configs.schema import Config
from learner.schedule.served_steps import serving_engines

FULL_SPEED = 0.97
"""Share of the engines' full speed that the frontier must allow."""

MIN_STEPS = 16
"""Fewest decoding steps of which the mean duration counts as measured."""

REPORT_WAIT_S = 5.0
"""Timeout for the engines' reports after a round, in seconds: more than two heartbeats."""
_POLL_S = 0.05

Speed = Callable[[float], float]
"""Tokens/s of all engines by their number of running sequences."""


class WidthSpeeds:
    """Speeds of the engines over a round's responses, by the frontier's width."""

    def __init__(self, lengths: Sequence[Sequence[int]], speed: Speed, *, places: int) -> None:
        """Prepares a replay.

        `lengths` has the tokens of each response, by group in the order of submission. `speed` is T(h); more sequences
        are never slower, since an engine need not run all of them. The engines run `places` sequences concurrently.
        """
        self._lengths, self._places = lengths, places
        num_useful = min(places, sum(map(len, lengths)))
        self._speeds = np.maximum.accumulate([speed(h) for h in range(num_useful + 1)]).tolist()
        self._full_s = self._round_s(len(lengths))

    def share(self, width: int) -> float:
        """Returns the share of full speed with `width` groups in service."""
        return self._full_s / self._round_s(width)

    def narrowest(self, least: int) -> int:
        """Returns the smallest width of at least `least` groups that keeps `FULL_SPEED`, at most all groups.

        Widths of 64 groups or more are tried in steps of 1/32.
        """
        width = least
        while width < len(self._lengths) and not (self._may_keep(width) and self.share(width) >= FULL_SPEED):
            width += max(1, width // 32)
        return min(width, len(self._lengths))

    def _may_keep(self, width: int) -> bool:
        """Returns False if the speed with all sequences of `width` groups is already too low; saves the replay."""
        num_running = min(width * max(map(len, self._lengths)), len(self._speeds) - 1)
        num_tokens = sum(map(sum, self._lengths))
        return self._speeds[num_running] * self._full_s >= FULL_SPEED * num_tokens

    def _round_s(self, width: int) -> float:
        """Returns the seconds until all responses are complete; h running sequences each receive T(h) / h tokens/s.

        T is the engine's throughput, in tokens/s (`throughput`). Groups enter in order, at most `width` at a time.
        """
        num_left = [len(group) for group in self._lengths]
        waiting: list[tuple[int, int]] = []
        """Heap of (order, length) of responses that wait for a place."""
        running: list[tuple[float, int]] = []
        """Heap of (tokens per sequence at its end, order)."""
        next_order = num_in_service = 0
        tokens = seconds = 0.0
        while True:
            while num_in_service < width and next_order < len(self._lengths):
                for length in self._lengths[next_order]:
                    heapq.heappush(waiting, (next_order, length))
                next_order, num_in_service = next_order + 1, num_in_service + 1
            while waiting and len(running) < self._places:
                order, length = heapq.heappop(waiting)
                heapq.heappush(running, (tokens + length, order))
            if not running:
                return seconds
            num_running = len(running)
            end, order = heapq.heappop(running)
            seconds += (end - tokens) * num_running / self._speeds[num_running]
            tokens = end
            num_left[order] -= 1
            num_in_service -= not num_left[order]


def with_losers(lengths: Sequence[int], num_requests: int) -> list[int]:
    """Returns the tokens of all requests of a group; those that lose its race run until the last of the K wins."""
    return [*lengths, *[max(lengths)] * (num_requests - len(lengths))]


def speed_of(reports: Sequence[ActorReport]) -> Speed | None:
    """Returns T(h) of the engines from what they measured, or None if some have not measured enough.

    Engines of one size share their measurements. h sequences are split over the engines by their sizes. A speed between
    two measured numbers of sequences is interpolated, and above the largest extrapolated by the last two (a power law;
    proportionally to h if there is only one).
    """
    by_size: dict[int, list[DecodeSpeed]] = {}
    for report in reports:
        rows = by_size.setdefault(report.max_sequences, [])
        for i, row in enumerate(report.decode_speeds):
            rows[i : i + 1] = [rows[i] + row if i < len(rows) else row]
    curves = {size: _points(rows) for size, rows in by_size.items()}
    if not all(curves.values()) or not curves:
        return None
    places = _places(reports)

    def speed(h: float) -> float:
        return sum(_at(curves[r.max_sequences], h * r.max_sequences / places) for r in reports)

    return speed


def _points(rows: Sequence[DecodeSpeed]) -> list[tuple[float, float]]:
    """Returns (mean running sequences, tokens/s) of the rows with at least `MIN_STEPS` steps."""
    return [
        (row.num_tokens / row.num_steps, row.num_tokens / row.seconds)
        for row in rows
        if row.num_steps >= MIN_STEPS and row.seconds
    ]


def _at(points: Sequence[tuple[float, float]], h: float) -> float:
    running, speeds = zip((0.0, 0.0), *points, strict=True)
    if h <= running[-1]:
        return float(np.interp(h, running, speeds))
    exponent = 1.0
    if len(points) > 1:
        exponent = math.log(speeds[-1] / speeds[-2]) / math.log(running[-1] / running[-2])
    return speeds[-1] * (h / running[-1]) ** min(max(exponent, 0.0), 1.0)


class FrontierWidth:
    """Width of a run's frontier: chosen at the end of the first round, and again if the engines' places change.

    A given width (admission.width) is only checked, once.
    """

    def __init__(self, config: Config, store: LearnerStore, *, on_wait: Callable[[], None] = lambda: None) -> None:
        """Starts before the first round; `on_wait` is called while it waits for reports, and may raise."""
        self._config, self._store, self._on_wait = config, store, on_wait
        self._is_needed = config.admission.policy == "frontier" and not config.environments_played
        self._lengths: dict[int, list[int]] = {}
        """Tokens of the responses of the round's groups, by order."""
        self._last_group_s = 0.0
        self._has_waited = False
        """True once it has waited for reports: engines that measure nothing must not delay each round."""
        self._width: int | None = None
        self._places = 0
        """Places of the engines for which the width was chosen or checked."""

    def observe(self, group: Group) -> None:
        """Records the response lengths of a group of the round."""
        if self._is_needed:
            self._last_group_s = time.monotonic()
            lengths = [rollout.tokens.size for rollout in group.rollouts]
            self._lengths[group.order] = with_losers(lengths, self._config.rounds.requests_per_group)

    def end_round(self) -> dict[str, float]:
        """Returns the metrics of the round, and sets the width of the next; no round's ticket may be open."""
        if self._config.admission.policy != "frontier":
            return {}
        width = self._width or self._config.admission_width or self._config.rounds.groups_issued
        if self._is_needed:
            self._choose([self._lengths[order] for order in sorted(self._lengths)])
            self._lengths = {}
        if self._config.chooses_width:
            self._store.set_frontier_width(self._width)  # each round: an older copy of the store may lack it
        return {"round/frontier_width": float(width)}

    def get_state(self) -> dict[str, Any]:
        """Returns the chosen width; JSON."""
        return {"width": self._width, "places": self._places, "rounds": self._rounds()}

    def resume(self, state: dict[str, Any] | None) -> None:
        """Restores the state that `get_state` returned, None before the first round, and sets the store's width.

        A width of rounds of other sizes is dropped: the next round ends with a choice.
        """
        if state is not None and self._config.chooses_width and state["rounds"] == self._rounds():
            self._width, self._places = state["width"], state["places"]
        self._store.set_frontier_width(self._width)

    def _rounds(self) -> list[int]:
        """Returns the sizes on which the width depends: groups per round, requests per group, groups per update."""
        rounds = self._config.rounds
        return [rounds.groups_issued, rounds.requests_per_group, rounds.groups_per_update]

    def _reports_of_round(self) -> list[ActorReport] | None:
        """Returns the engines' reports after the round's last group; None if one does not arrive in time."""
        self._has_waited = True
        now_s = time.monotonic()
        ended_s, deadline_s = self._store.now_s() - (now_s - self._last_group_s), now_s + REPORT_WAIT_S
        while (reports := serving_engines(self._store, after_s=ended_s)) is None and time.monotonic() < deadline_s:
            self._on_wait()
            time.sleep(_POLL_S)
        return reports

    def _choose(self, lengths: Sequence[Sequence[int]]) -> None:
        reports = serving_engines(self._store, needs_all=False)  # one that starts later changes the places
        is_checked = self._places > 0 and not self._config.chooses_width
        if reports is None or _places(reports) == self._places or is_checked or not lengths:
            return
        reports = (None if self._has_waited else self._reports_of_round()) or reports
        places, speed = _places(reports), speed_of(reports)
        if speed is None:
            logging.info("frontier width not chosen: an engine has timed too few decoding steps")
            return
        self._places = places
        speeds = WidthSpeeds(lengths, speed, places=places)
        chosen = speeds.narrowest(self._config.rounds.groups_per_update)
        if self._config.chooses_width:
            self._width = chosen
            logging.info("frontier width chosen groups=%d speed=%.3f places=%d", chosen, speeds.share(chosen), places)
        elif (warning := too_narrow(speeds, self._config.admission_width, chosen)) is not None:
            logging.warning("%s", warning)


def _places(reports: Sequence[ActorReport]) -> int:
    return sum(report.max_sequences for report in reports)


def too_narrow(speeds: WidthSpeeds, width: int, chosen: int) -> str | None:
    """Returns a warning if `width` costs the engines speed and `chosen` does not, else None."""
    if (share := speeds.share(width)) >= FULL_SPEED:
        return None
    return (
        f"admission.width ({width}) leaves the engines an estimated {share:.0%} of their full speed; "
        f"set admission.width=auto, or {chosen}"
    )
