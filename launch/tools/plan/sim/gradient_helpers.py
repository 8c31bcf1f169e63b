"""Engines' chips that help a learner with chips of its own, as long as that pays.

`learner/schedule/scale_down_criteria.py` decides whether it does.
"""

from launch.tools.plan.profile import HelperProfile, Profile
from launch.tools.plan.sim.event_queue import EventQueue
from learner.metrics.round_times import WaitingRatios
from learner.schedule.scale_down_criteria import RoundCost, pays


class SimHelpers:
    """Chips that help in the current round."""

    def __init__(self, profile: Profile, calendar: EventQueue) -> None:
        self._profile, self._calendar = profile, calendar
        self._costs = profile.helpers or HelperProfile()
        self._last: dict[bool, RoundCost] = {}
        """Last long and last short round."""
        self._chip_s = 0.0
        self._rollout_s: float | None = None
        self.num_chips = 0

    def trained(self, tokens: int) -> None:
        """Counts tokens that are trained in the round."""
        self._chip_s += tokens * self._profile.learner.seconds_per_token

    def alone_s(self, tokens: int) -> float:
        """Returns the seconds that the learner's own chips need for tokens."""
        return tokens * self._profile.learner.seconds_per_token / max(1, self._profile.num_learner_chips)

    def rollout_ended(self, clock: WaitingRatios) -> None:
        """Records that the round has nothing more to generate."""
        if self._rollout_s is None and clock.rollout_start_s is not None:
            self._rollout_s = self._calendar.now_s - self._costs.start_s - clock.rollout_start_s

    def pays(self, num_chips: int, clock: WaitingRatios, *, is_long: bool) -> bool:
        """Returns True if a round like the last one of its kind ends sooner with this many more chips from now on."""
        start_s = clock.rollout_start_s or 0.0
        return pays(
            self._last.get(is_long),
            self._costs,
            num_own=self._profile.num_learner_chips,
            num_helping=num_chips,
            now_s=self._calendar.now_s - start_s,
            first_s=None if clock.train_start_s is None else clock.train_start_s - start_s,
        )

    def join(self, num_chips: int, *, left_s: float, is_over: bool) -> bool:
        """Lets chips help; returns False if they are no more than before, or too late to pay.

        `left_s` is the time that the learner's own chips still need for what has arrived, in seconds.
        """
        own = self._profile.num_learner_chips
        gain_s = left_s * num_chips / (own + num_chips)
        is_late = is_over and not self.num_chips and gain_s < self._costs.hand_over_s + self._costs.wake_s
        if is_late or num_chips <= self.num_chips:
            return False
        self.num_chips = num_chips
        return True

    def leave(self, *, is_colocated: bool) -> float:
        """Ends the help of an update; returns the seconds until the engines serve again."""
        had_chips, self.num_chips = self.num_chips or is_colocated, 0
        return self._costs.wake_s if had_chips else 0.0

    def end_round(self, *, is_long: bool) -> None:
        """Remembers the round for `pays`."""
        if self._rollout_s is not None:
            self._last[is_long] = RoundCost(rollout_s=self._rollout_s, device_s=self._chip_s)
        self._rollout_s, self._chip_s = None, 0.0
