"""Versions on their way from the learner to the engines, in virtual time: written, fetched beside generation, taken."""

from collections.abc import Callable
from typing import NamedTuple

from configs.schema import Config
from launch.plan.calendar import Calendar
from launch.plan.cluster.transfers import Transfers
from launch.plan.profiles import Profile


class Publish(NamedTuple):
    """A version that went out."""

    step: int
    number: int
    """Of those that went out; the weights of before the first step are 0."""
    at_s: float
    """When the learner had exported it."""


class Updates:
    """One version is fetched at a time; of those that come meanwhile the newest is next."""

    def __init__(self, config: Config, profile: Profile, calendar: Calendar, take: Callable[[int], None]) -> None:
        """The engines hold the weights of step 0; `take` has them take those of a step."""
        self._profile, self._calendar, self._take = profile, calendar, take
        self._transfers = Transfers.of(config, profile)
        self._newest = self._held = Publish(0, 0, 0.0)
        self._is_fetching = False
        self._num_taken, self._spent_s = 0, 0.0

    @property
    def mean_s(self) -> float:
        """From a version's export to engines that serve it, over those that they took."""
        return self._spent_s / max(1, self._num_taken)

    def publish(self, step: int) -> None:
        """The learner has exported the weights of `step`."""
        self._newest = Publish(step, self._newest.number + 1, self._calendar.now_s)
        if not self._is_fetching:
            self._fetch(self._newest)

    def _fetch(self, version: Publish) -> None:
        self._is_fetching = True
        now_s, fetch_s = self._calendar.now_s, self._profile.publish.prefetch_s
        if self._transfers is not None:
            # Learner hosts wrote it, or are at it, while the version before was fetched.
            fetch_s += max(0.0, version.at_s + self._transfers.announce_s(version.number) - now_s)
            num_bytes = self._transfers.num_bytes(version.number, held=self._held.number)
            fetch_s += self._transfers.download_s(num_bytes)
        self._calendar.at(now_s + fetch_s, self._fetched, version)

    def _fetched(self, version: Publish) -> None:
        self._is_fetching = False
        self._held = version
        self._num_taken += 1
        self._spent_s += self._calendar.now_s + self._profile.publish.pause_s - version.at_s
        self._take(version.step)
        if self._newest is not version:
            self._fetch(self._newest)
