from typing import Any
from unittest import mock

import pytest

from learner.commands import Alive, Apply, Discard, End, decode, encode
from learner.distributed.channel import Channel, Processes, ProcessLostError, SingleProcess
from learner.replicate import ALIVE_S, Replicator, follow
from tests.learner.streams import config_of

CONFIG = config_of()


class Hosts(Processes, Channel):
    """Two processes; what the leader said is kept, and what it says is given."""

    index, count, is_leader = 0, 2, True

    def __init__(self, *says: Any) -> None:
        self.told: list[Any] = []
        self.timeouts_s: list[float] = []
        self._says = iter(says)

    def channel(self, name: str) -> "Hosts":
        del name
        return self

    def broadcast(self, message: bytes | None, *, timeout_s: float) -> bytes:
        if message is not None:
            self.told.append(decode(message, CONFIG.packing))
            return message
        self.timeouts_s.append(timeout_s)
        said = next(self._says, None)
        if said is None:
            raise ProcessLostError("process 0 said nothing")
        return encode(said)

    def gather(self, message: bytes, *, timeout_s: float) -> list[bytes]:
        raise NotImplementedError


def test_leader_tells_a_command_before_it_does_it_and_returns_what_it_does():
    hosts, trainer = Hosts(), mock.Mock()
    trainer.optimizer_step.side_effect = lambda epoch: (len(hosts.told), epoch)
    assert Replicator(hosts).do(Apply(2), trainer) == (1, 2)
    assert hosts.told == [Apply(2)]


def test_leader_alone_tells_nobody():
    trainer = mock.Mock()
    lead = Replicator(SingleProcess())
    with mock.patch("learner.replicate.encode", side_effect=AssertionError("told")):
        lead.do(Apply(0), trainer)
        lead.keep_alive()
    assert trainer.optimizer_step.call_count == 1


def test_waiting_leader_says_that_it_lives_now_and_then():
    now_s = 0.0
    hosts = Hosts()
    lead = Replicator(hosts, clock=lambda: now_s)
    for _ in range(100):
        lead.keep_alive()
        now_s += ALIVE_S / 10
    assert 8 <= len(hosts.told) <= 10 and set(hosts.told) == {Alive()}


def test_follower_does_what_it_is_told_until_the_end_with_the_starts_patience_up_to_the_first_update():
    hosts, trainer, did = Hosts(Discard(), Alive(), Apply(0), Discard(), End(3)), mock.Mock(), []
    assert follow(trainer, hosts, CONFIG, did=did.append) == 3
    assert trainer.method_calls == [mock.call.discard(), mock.call.optimizer_step(0), mock.call.discard()]
    assert did == [Discard(), Alive(), Apply(0), Discard()]
    start_s, work_s = CONFIG.supervision.start_timeout_s, CONFIG.supervision.progress_timeout_s
    assert hosts.timeouts_s == [start_s] * 3 + [work_s] * 2


def test_follower_of_a_silent_leader_ends():
    with pytest.raises(ProcessLostError):
        follow(mock.Mock(), Hosts(Alive()), CONFIG, did=lambda _: None)
