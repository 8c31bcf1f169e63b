"""The store in virtual time: groups go through it one after the other, beside all that it is asked for besides."""

from collections.abc import Callable

from configs.schema import Config
from launch.plan.calendar import Calendar
from launch.plan.cluster.limits import Cluster, first_to_give_out
from launch.plan.cluster.profile import StoreProfile
from launch.plan.cluster.store_parts import BYTES, GROUPS
from launch.plan.cluster.workload import group_bytes
from launch.plan.profiles import Profile

_MOST_CONTROL = 0.95
"""Part of the store's time that control calls get at most: their callers wait for one before they make the next."""


class StoreLine:
    """First come, first served."""

    def __init__(self, config: Config, profile: Profile, store: StoreProfile, calendar: Calendar) -> None:
        """Nobody is in line."""
        self._calendar, self._store = calendar, store
        self._free_at_s = 0.0
        self.num_groups = 0
        self.spent_s = 0.0
        """From being handed in to being there for the learner, summed over groups."""
        cluster = Cluster.of(config, profile)
        self._goes_to_bucket, self._num_puts = cluster.groups_go_to_bucket, cluster.workload.puts_per_group
        # At the pace at which something gives out; if that is the store, groups take just what control calls leave.
        seconds = cluster.store_seconds(store, first_to_give_out(cluster).groups_per_s)
        control = sum(s for name, s in seconds.items() if name not in (GROUPS, BYTES))
        self._stretch = 1 / (1 - min(control, _MOST_CONTROL))
        """A group takes so many times its own seconds, control calls being served in between."""

    @property
    def mean_s(self) -> float:
        """From a group's being handed in to its being there for the learner."""
        return self.spent_s / max(1, self.num_groups)

    def put(self, *, num_samples: int, prompt_tokens: int, response_tokens: int, then: Callable[[], None]) -> None:
        """Hands a group in; `then` is called when the learner may read it.

        Single samples (admission.unit=sample) are counted as handed in together, with the last of them.
        """
        now_s = self._calendar.now_s
        num_bytes = group_bytes(num_samples=num_samples, prompt_tokens=prompt_tokens, response_tokens=response_tokens)
        took_s = self._num_puts * self._store.group_s
        took_s += 0.0 if self._goes_to_bucket else num_bytes * self._store.byte_s
        self._free_at_s = max(self._free_at_s, now_s) + took_s * self._stretch
        self.num_groups += 1
        self.spent_s += self._free_at_s - now_s
        self._calendar.at(self._free_at_s, then)
