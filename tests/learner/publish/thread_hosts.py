"""A learner of several hosts in one process, a thread each: channels by queues."""

import queue

from learner.distributed.channel import Channel, Processes, ProcessLostError


class ThreadChannel(Channel):
    def __init__(self, index: int, to: list[queue.SimpleQueue[bytes]], back: list[queue.SimpleQueue[bytes]]) -> None:
        self._index, self._to, self._back = index, to, back

    def broadcast(self, message: bytes | None, *, timeout_s: float) -> bytes:
        if self._index == 0:
            assert message is not None
            for other in self._to[1:]:
                other.put(message)
            return message
        assert message is None
        return _taken(self._to[self._index], timeout_s)

    def gather(self, message: bytes, *, timeout_s: float) -> list[bytes]:
        if self._index:
            self._back[self._index].put(message)
            return []
        return [message, *(_taken(one, timeout_s) for one in self._back[1:])]


class ThreadHosts(Processes):
    """One of them; `of` makes all."""

    def __init__(self, index: int, count: int, channels: dict) -> None:
        self.index, self.count, self.is_leader = index, count, index == 0
        self._channels = channels

    @classmethod
    def of(cls, count: int) -> "list[ThreadHosts]":
        channels: dict = {}
        return [cls(i, count, channels) for i in range(count)]

    def channel(self, name: str) -> ThreadChannel:
        to, back = self._channels.setdefault(
            name, tuple([queue.SimpleQueue() for _ in range(self.count)] for _ in range(2))
        )
        return ThreadChannel(self.index, to, back)


def _taken(messages: "queue.SimpleQueue[bytes]", timeout_s: float) -> bytes:
    try:
        return messages.get(timeout=min(timeout_s, 60.0))
    except queue.Empty:
        raise ProcessLostError("nothing was said") from None
