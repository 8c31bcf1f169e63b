"""A meeting of threads that stand for hosts: all come to the same places, or all hear that one did not."""

import concurrent.futures
from collections.abc import Callable

import pytest

from learner.distributed.channel import Barrier, BarrierBrokenError
from tests.learner.publish.thread_hosts import ThreadHosts

COUNT, DEADLINE_S = 3, 60.0


class Hosts:
    """Each host's meeting, and a thread for it."""

    def __init__(self) -> None:
        self.hosts = ThreadHosts.of(COUNT)
        self.channels = [host.channel("meeting") for host in self.hosts]
        self.threads = concurrent.futures.ThreadPoolExecutor(2 * COUNT)
        self.meet()

    def meet(self) -> None:
        """Another meeting on the same channel."""
        each = zip(self.hosts, self.channels, strict=True)
        self.meetings = [Barrier(host, channel, timeout_s=DEADLINE_S) for host, channel in each]

    def do(self, *calls: Callable[[Barrier], None]) -> list[BaseException | None]:
        """What each host's call raised; all at once."""
        futures = [self.threads.submit(call, meeting) for call, meeting in zip(calls, self.meetings, strict=True)]
        return [future.exception(DEADLINE_S) for future in futures]


@pytest.fixture
def hosts():
    made = Hosts()
    yield made
    made.threads.shutdown(wait=False, cancel_futures=True)


def at(place: str) -> Callable[[Barrier], None]:
    return lambda meeting: meeting.wait(place)


def are_over(errors: list[BaseException | None]) -> bool:
    return all(isinstance(error, BarrierBrokenError) for error in errors)


def test_hosts_that_come_to_the_same_places_go_on(hosts):
    for place in ("begun", "written", "begun"):
        assert hosts.do(*[at(place)] * COUNT) == [None] * COUNT


@pytest.mark.parametrize("who", range(COUNT))
def test_host_that_comes_elsewhere_ends_the_meeting_for_all_and_the_next_one_is_as_any(hosts, who):
    assert hosts.do(*[at("begun")] * COUNT) == [None] * COUNT
    calls = [at("written")] * COUNT
    calls[who] = at("ended")
    assert are_over(hosts.do(*calls))
    for index in range(COUNT):  # nobody waits for the others any more
        with pytest.raises(BarrierBrokenError):
            hosts.meetings[index].wait("ended")
        hosts.meetings[index].end()
    hosts.meet()
    assert hosts.do(*[at("begun")] * COUNT) == [None] * COUNT


@pytest.mark.parametrize("waiting", [[], [0], [1, 2], [0, 1, 2]])
def test_end_by_all_frees_whatever_threads_wait(hosts, waiting):
    threads = [hosts.threads.submit(hosts.meetings[index].wait, "written") for index in waiting]
    assert hosts.do(*[Barrier.end] * COUNT) == [None] * COUNT
    errors = [thread.exception(DEADLINE_S) for thread in threads]
    assert are_over(errors) or (len(waiting) == COUNT and errors == [None] * COUNT)
    hosts.meet()
    assert hosts.do(*[at("begun")] * COUNT) == [None] * COUNT
