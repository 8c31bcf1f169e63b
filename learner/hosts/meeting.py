"""Where threads of all the learner's processes wait for each other, and hear at once that one of them failed."""

import threading

from learner.hosts.hosts import Channel, Hosts

_OVER = "over"


class MeetingOverError(RuntimeError):
    """Hosts came to different places: one of them failed on the way, and says why elsewhere."""


class Meeting:
    """A barrier of several places, which all come to in the same order; over for good once they don't.

    A host that fails skips a place, and comes to the next one, or ends the meeting: the others, who wait where it never
    comes to, hear of it then, not when their time is up. Used by one thread at a time in a process; `end` by any.
    """

    def __init__(self, hosts: Hosts, channel: Channel, *, timeout_s: float) -> None:
        """Nobody came yet.

        Args:
          hosts: the learner's processes; each makes its own, at the same time.
          channel: of the meetings alone, one after the other.
          timeout_s: how long a host waits for the others.
        """
        self._is_leader, self._channel, self._timeout_s = hosts.is_leader, channel, timeout_s
        self._lock = threading.Lock()
        self._is_over = False

    def wait(self, place: str) -> None:
        """Returns when all hosts are at that place.

        Raises:
          MeetingOverError: a host is elsewhere, or was before.
          HostLostError: a host did not come.
        """
        with self._lock:
            if not self._is_over:
                self._is_over = not self._are_all_at(place)
            if self._is_over:
                raise MeetingOverError("another of the learner's processes failed")

    def end(self) -> None:
        """Nobody waits any more: all hosts call it once one has failed, whatever their other threads still do.

        Raises:
          HostLostError: a host did not come.
        """
        with self._lock:
            if not self._is_over:
                self._are_all_at(_OVER)
                self._is_over = True

    def _are_all_at(self, place: str) -> bool:
        places = self._channel.gather(place.encode(), timeout_s=self._timeout_s)
        said = b"%d" % (len(set(places)) == 1) if self._is_leader else None
        return self._channel.broadcast(said, timeout_s=self._timeout_s) == b"1"
