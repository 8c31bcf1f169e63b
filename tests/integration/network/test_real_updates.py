"""Two actors with real vLLM, killed in every phase of an update, over PostgreSQL with TLS and weights over HTTPS."""

import collections
import json
import os
import signal
import time
from collections.abc import Generator, Iterable

import pytest

from tests.integration.network.cluster import Cluster
from tests.integration.network.conftest import NewCluster
from tests.integration.network.real import doom
from tests.integration.network.real.oracle import BOUND, Oracle
from tests.integration.support.jobs import is_alive
from tests.support.lazy import torch

# An engine starts in a minute, and each can be killed once.
pytestmark = [pytest.mark.integration, pytest.mark.engine, pytest.mark.nightly]

LIVES = {
    "keep": {
        "a": ("announced", "verify", "checked", "load", ""),
        "b": ("download", "mirrored", "paused", "core", "resumed", ""),
    },
    "abort_and_resume": {"a": ("paused", ""), "b": ("load", "")},
}
"""By publish.at_publish, what each actor dies of, one life after the other; in its last it goes on."""
DEADLINE_S = 400.0


@pytest.fixture
def one_thread() -> Generator[None]:
    """For the oracle: many small products on cores that others use too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Chain:
    """The lives of one actor."""

    def __init__(self, run: Cluster, name: str, core: int, phases: Iterable[str]) -> None:
        self.run, self.name, self._core = run, name, core
        self._phases = collections.deque(phases)
        self.deaths: list[doom.Note] = []
        self.begin()

    @property
    def phase(self) -> str:
        """That this life ends in; empty: it does not."""
        return self._phases[0]

    def begin(self) -> None:
        """Starts it, under its old name, on a core of its own."""
        self.run.start_actor(self.name, die_at=self.phase, arguments=[f"--config.actor.cpu_cores={self._core}"])

    def look(self) -> None:
        """If it has died, checks how, and starts it again."""
        code = self.run.actors[self.name].poll()
        if code is None:
            return
        # One whose engine is gone says so and ends by itself.
        assert code == (1 if self.phase == "core" else -signal.SIGKILL), self.run.logs()
        note = doom.read_note(self.run.note(self.name, self.phase))
        assert note.phase == self.phase
        self.run.wait(lambda: not any(map(is_alive, note.below)), f"the end of what {self.name} started")
        self.deaths.append(note)
        self._phases.popleft()
        self.begin()

    def wait_until_it_serves(self) -> None:
        """A version more than before; it must not die on the way."""
        before = len(self.run.versions(self.name))

        def serves() -> bool:
            assert self.run.actors[self.name].poll() is None, "it ended"
            return len(self.run.versions(self.name)) > before

        self.run.wait(serves, f"{self.name} serves", deadline_s=DEADLINE_S)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("at_publish", LIVES)
def test_real_actors_die_in_every_phase_and_each_token_is_of_the_version_it_names(
    new_cluster: NewCluster, at_publish: str
):
    told = {"num_groups": 10**6, "groups_per_version": 8, "window": 32, "response_tokens": 200, "leader_lease_s": 20.0}
    told["length_spread"] = 201  # or all requests would end at once, and that is when versions come
    with new_cluster(is_real=True, at_publish=at_publish, **told) as run:
        start = time.monotonic()
        run.start_learner()
        cores = sorted(os.sched_getaffinity(0))
        lives = LIVES[at_publish]
        chains = [Chain(run, name, cores[i % len(cores)], lives[name]) for i, name in enumerate(lives)]

        def all_have_died() -> bool:
            for chain in chains:
                chain.look()
            return not any(chain.phase for chain in chains)

        run.wait(all_have_died, "death in each phase", deadline_s=DEADLINE_S * len(doom.PHASES))
        for chain in chains:
            chain.wait_until_it_serves()
        run.wait_for_groups(run.num_trained + 2 * run.told.groups_per_version)
        run.finish()
        run.check()
        deaths = [note for chain in chains for note in chain.deaths]
        assert {note.phase for note in deaths} == {phase for phases in lives.values() for phase in phases if phase}
        known = [note.num_requests for note in deaths if note.num_requests >= 0]
        assert any(known), "requests ran when one died"
        for name in lives:
            served = run.versions(name)
            assert served == sorted(served) and served[-1].step == run.told.last_step
        oracle = Oracle(run.told.model, run.told.weights, keeps_cache=at_publish == "keep")
        groups = run.groups
        assert sorted(g.ticket_id for g in groups) == run.told.tickets
        off = {g.ticket_id: oracle.off(g) for g in groups}
        num_versions = collections.Counter(1 + g.max_step - g.min_step for g in groups)
        print(
            json.dumps(
                {
                    "groups": len(groups),
                    "versions": run.told.last_step,
                    "of several versions": len(groups) - num_versions[1],
                    "largest off": max(off.values()),
                    "requests at death": {note.phase: note.num_requests for note in deaths},
                    "seconds": round(time.monotonic() - start),
                }
            )
        )
        assert max(off.values()) < BOUND, [t for t, o in off.items() if o >= BOUND][:5]
        assert len(groups) - num_versions[1] > len(groups) / 10
