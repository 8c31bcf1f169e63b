"""A learner without a model, a process of its own: it publishes, asks, reads, keeps a ledger, acknowledges.

python -m tests.integration.network.simulated.learner SETTING.json

Store, snapshots, announcements, lead and card are the real ones; "training" a group is to check that each of its tokens
is of the version it is stamped with, and to write its id into the ledger, which is on disk before it is acknowledged.
Ends with 0 when all groups are trained and every live actor serves the last version, with 1 and one line for a failure.
SIGUSR1 makes what is asked for by then all that there is; SIGTERM ends it as it is.
"""

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Generator

from absl import logging

from bridge import codec
from bridge.files import replace_file
from bridge.rollout_types import Sampling, Task, Ticket, Version
from bridge.store.open import create_run, open_store
from bridge.store.protocol import LearnerStore, StoredGroup
from bridge.store.store_errors import LearnerLivesError
from launch import cli
from launch.supervision.process_tree import die_with_parent
from tests.bridge.factories import make_ticket
from tests.integration.network.simulated import model, setting
from tests.integration.network.simulated.ledger import Ledger
from tests.integration.network.simulated.publishing import Publishing, publishing
from tests.integration.network.simulated.setting import Setting

WAIT_S = 0.5
ALIVE_S = 6.0
"""An actor whose last heartbeat is older is taken to be gone."""


class Learner:
    """One life of the learner."""

    def __init__(self, told: Setting, store: LearnerStore, publishing: Publishing, incarnation: int) -> None:
        self._told, self._store, self._publishing, self._incarnation = told, store, publishing, incarnation
        self._ledger = Ledger(told.ledger)
        self._version: Version | None = None
        self._after_seq = 0
        self._num_put = 0
        self._read: set[str] = set()
        """Groups that came in this life; those of an earlier one that were not acknowledged come again."""

    @property
    def _step(self) -> int:
        return len(self._ledger.tickets) // self._told.groups_per_version

    def run(self, stop: threading.Event, close: threading.Event) -> None:
        """Until all is trained, or `stop`; from `close` on nothing more is asked for."""
        while not stop.is_set() and len(self._ledger.tickets) < self._told.goal:
            if close.is_set() and not self._told.goal_file.exists():
                replace_file(self._told.goal_file, str(self._num_put).encode())
            if self._version is None or self._version.step < self._step:
                self._publish()
            self._ask()
            mark = self._store.mark()
            groups = self._store.read_groups(after_seq=self._after_seq, limit=16)
            if groups:
                self._train(groups)
            else:
                self._store.wait(mark, ("groups",), timeout_s=WAIT_S)
        if not stop.is_set() and self._version != Version(incarnation=self._incarnation, step=self._step):
            self._publish()  # the last one, that all actors come to serve
        while not stop.is_set() and not self._all_serve():
            stop.wait(WAIT_S / 5)

    def _all_serve(self) -> bool:
        """Whether every live actor serves the version published last."""
        horizon_s = self._store.now_s() - ALIVE_S
        served = [b.version for b in self._store.heartbeats() if b.role == "actor" and b.time_s > horizon_s]
        return bool(served) and all(v == self._version for v in served)

    def _publish(self) -> None:
        self._version = Version(incarnation=self._incarnation, step=self._step)
        start = time.perf_counter()
        self._publishing.publish(self._version)
        logging.info("published version=%s seconds=%.3f", self._version, time.perf_counter() - start)

    def _ask(self) -> None:
        """Keeps a window of tickets out; what an earlier life asked for is there already."""
        end = min(len(self._ledger.tickets) + self._told.window, self._told.goal)
        if end > self._num_put:
            self._store.put_tickets(self._ticket(order) for order in range(self._num_put, end))
            self._num_put = end

    def _ticket(self, order: int) -> Ticket:
        assert self._version is not None
        more = 83 * order % self._told.length_spread
        return make_ticket(
            setting.ticket_id(order),
            order=order,
            num_samples=self._told.samples_per_group,
            task=Task.judged_by("exact", answer="0"),
            sampling=Sampling(max_tokens=self._told.response_tokens + more, ignore_eos=True),
            min_version=self._version,
        )

    def _train(self, groups: list[StoredGroup]) -> None:
        if any(stored.group.incarnation > self._incarnation for stored in groups):
            self._store.renew_leadership(
                lease_s=self._told.leader_lease_s
            )  # refused: another learner leads, and these are its own
        for stored in groups:
            if stored.group.ticket_id in self._read:
                raise RuntimeError(f"DOUBLE: {stored.group.ticket_id} came twice")
            self._read.add(stored.group.ticket_id)
            if self._told.is_real:  # what its tokens must be takes a model to tell: the test's own
                replace_file(self._told.kept_groups / stored.group.ticket_id, codec.encode(stored.group))
            elif (fault := model.check_tokens(stored.group)) is not None:
                raise RuntimeError(f"MIXTURE of versions: {fault}")
            if stored.group.max_step > self._step:
                raise RuntimeError(f"{stored.group.ticket_id} was made by a version that is not published")
        self._ledger.add(groups, now_s=time.time())
        self._store.acknowledge([s.group.ticket_id for s in groups])
        self._after_seq = groups[-1].seq


def serve(told: Setting, stop: threading.Event, close: threading.Event) -> None:
    """Leads the run until it is done."""
    config = told.config
    where = config.store.url
    create_run(where, run=told.run, name=told.name, actor_role=config.store.actor_role, retry_s=told.retry_s)
    with contextlib.closing(open_store(where, run=told.run, retry_s=told.retry_s)) as store:
        incarnation = _lead(store, told, stop)
        logging.info("learner leads run=%s incarnation=%d", told.run, incarnation)
        with keeping_lead(store, told.leader_lease_s, stop), publishing(told, store) as out:
            Learner(told, store, out, incarnation).run(stop, close)
        store.release_leadership()


def _lead(store: LearnerStore, told: Setting, stop: threading.Event) -> int:
    """Becomes the run's learner, as soon as one elsewhere no longer is."""
    while True:
        try:
            return store.acquire_leadership(told.folder, lease_s=told.leader_lease_s)
        except LearnerLivesError as e:
            if stop.wait(WAIT_S):
                raise
            logging.info("not yet: %s", e)


@contextlib.contextmanager
def keeping_lead(store: LearnerStore, lease_s: float, stop: threading.Event) -> Generator[None]:
    """Extends the lead within the block; one that is lost ends the process."""
    ended = threading.Event()
    errors: list[BaseException] = []

    def keep() -> None:
        try:
            while not ended.wait(lease_s / 3):
                store.renew_leadership(lease_s=lease_s)
        except BaseException as e:
            errors.append(e)
            stop.set()

    thread = threading.Thread(target=keep, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(timeout=lease_s)
    if errors:
        raise errors[0]


def main(file: str) -> int:
    """One life."""
    die_with_parent()
    cli.log_to_stderr()
    told = setting.read(file)
    stop, close = threading.Event(), threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    signal.signal(signal.SIGUSR1, lambda *_: close.set())
    try:
        serve(told, stop, close)
    except Exception as e:
        logging.info("learner failed", exc_info=True)
        print(f"error: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
