"""Both engines of the store side by side: groups a second, and what kills of server and clients cost.

    python -m tests.bench.store [--small]

Producers claim tickets and hand groups in; a learner offers tickets, reads groups and acknowledges eight at a time, as
learner and actors do. A group of 64 KB is 2 responses of 2,520 tokens, one of 2 MB 8 of 20,000. Each process is one of
its own; SQLite is a file on the same disk as PostgreSQL's data, and every transaction is on that disk before its call
returns (synchronous=FULL, fsync on). Encoding, checking and decoding groups is part of it.

Then three producers and a learner train 5,000 small groups on PostgreSQL while server and clients are killed 20 times
each (SIGKILL); what was trained, and how often, is read from the learner's own ledger. Writes
`results/store.{json,md}`.
"""

import contextlib
import dataclasses
import pathlib
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Generator, Iterator

import numpy as np
from absl import app

from bridge import codec
from bridge.rollout_types import Group, Ticket
from bridge.store.open import create_run, open_store
from tests.bench.rig import report
from tests.bridge.factories import make_group, make_rollout, make_ticket
from tests.integration.support.processes import kill, spawn
from tests.integration.support.store_torture import Outcome, Urls, torture
from tests.postgres import ACTOR, Server, start_server

RUN = "bench"
WINDOW, ACKNOWLEDGE_EVERY, CLAIM_AT_ONCE = 48, 8, 4
REPEATS = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """A group's: K responses of T tokens."""

    name: str
    num_samples: int
    num_tokens: int
    num_groups: int
    """That a measurement takes; a tenth of them passes before the clock is read."""

    def group(self, ticket: Ticket, actor: str) -> Group:
        return make_group(ticket, actor=actor, rollouts=(make_rollout(self.num_tokens),) * self.num_samples)

    def ticket(self, order: int) -> Ticket:
        prompt = np.array([order, 1], np.int32)
        return make_ticket(f"t{order}", order=order, num_samples=self.num_samples, prompt_tokens=prompt)


SIZES = {
    "64 KB": Size(name="64 KB", num_samples=2, num_tokens=2_520, num_groups=600),
    "2 MB": Size(name="2 MB", num_samples=8, num_tokens=20_000, num_groups=60),
}


def produce(url: str, size: Size, name: str) -> None:
    """Serves tickets until it is killed."""
    with contextlib.closing(open_store(url, run=RUN)) as store:
        while True:
            mark = store.mark()
            tickets = store.claim(name, limit=CLAIM_AT_ONCE, lease_s=60)
            for ticket in tickets:
                store.put_group(size.group(ticket, name))
            if not tickets:
                store.wait(mark, ("tickets",), timeout_s=1.0)


def groups_per_s(urls: Urls, size: Size, *, num_producers: int, num_groups: int) -> float:
    """What a learner gets from so many producers."""
    create_run(urls.learner, run=RUN, name="bench", actor_role=ACTOR)
    warm_up = max(1, num_groups // 10)
    producers = [spawn("tests.bench.store", urls.actor, size.name, f"p{i}") for i in range(num_producers)]
    try:
        with contextlib.closing(open_store(urls.learner, run=RUN)) as store:
            store.acquire_leadership("bench", lease_s=600)
            num_issued = num_read = after_seq = 0
            began_s = 0.0
            unacknowledged: list[str] = []
            while num_read < warm_up + num_groups:
                mark = store.mark()
                if num_issued < num_read + WINDOW // 2:
                    upto = num_read + WINDOW
                    store.put_tickets([size.ticket(i) for i in range(num_issued, upto)])
                    num_issued = upto
                stored = store.read_groups(after_seq=after_seq, limit=ACKNOWLEDGE_EVERY)
                for one in stored:
                    after_seq = one.seq
                    num_read += 1
                    unacknowledged.append(one.group.ticket_id)
                    if num_read == warm_up:
                        began_s = time.perf_counter()
                if len(unacknowledged) >= ACKNOWLEDGE_EVERY:
                    store.acknowledge(unacknowledged)
                    unacknowledged = []
                if not stored:
                    store.wait(mark, ("groups",), timeout_s=1.0)
            return (num_read - warm_up) / (time.perf_counter() - began_s)
    finally:
        for producer in producers:
            kill(producer)


@contextlib.contextmanager
def places(folder: pathlib.Path, server: Server) -> Generator[dict[str, Iterator[Urls]]]:
    """New stores of each engine, as many as are asked for."""

    def sqlite() -> Iterator[Urls]:
        while True:
            url = f"sqlite:///{tempfile.mkdtemp(dir=folder)}/store.db"
            yield Urls(learner=url, actor=url)

    def postgres() -> Iterator[Urls]:
        while True:
            learner, actor = server.create_store()
            yield Urls(learner=learner, actor=actor)

    yield {"sqlite": sqlite(), "postgres": postgres()}


def killed(folder: pathlib.Path, server: Server, *, num_groups: int, kills: int) -> Outcome:
    """The torture's outcome."""
    learner, actor = server.create_store()

    def kill_server() -> None:
        server.kill()
        server.restart()

    urls = Urls(learner=learner, actor=actor)
    return torture(urls, folder, num_groups=num_groups, client_kills=kills, server_kills=kills, kill_server=kill_server)


def main(argv: list[str]) -> None:
    del argv
    small = report.SMALL.value
    folder = pathlib.Path(tempfile.mkdtemp(prefix="sluice-bench-"))
    folder.chmod(0o711)  # the user that root's server runs as goes through it
    server = start_server(folder / "postgres")
    values: dict[str, float] = {}
    rows: list[list[str]] = []
    try:
        with places(folder, server) as engines:
            for size in SIZES.values():
                num_bytes = len(codec.encode(size.group(size.ticket(0), "p0"), max_bytes=codec.MAX_BYTES))
                num_groups = size.num_groups // 20 if small else size.num_groups
                for num_producers in (1, 3):
                    for engine, urls in engines.items():
                        speeds = [
                            groups_per_s(next(urls), size, num_producers=num_producers, num_groups=num_groups)
                            for _ in range(1 if small else REPEATS)
                        ]
                        mean, spread = report.mean_std(speeds)
                        name = f"{engine}_groups_per_s{'_2mb' if size.name == '2 MB' else ''}"
                        values[name + ("_3_producers" if num_producers > 1 else "")] = mean
                        mb_per_s = f"{statistics.fmean(speeds) * num_bytes / 1e6:.0f}"
                        rows.append([size.name, str(num_producers), engine, f"{mean:.0f} ± {spread:.0f}", mb_per_s])
                        print(*rows[-1], flush=True)
        (folder / "torture").mkdir()
        outcome = killed(folder / "torture", server, num_groups=200 if small else 5000, kills=2 if small else 20)
    finally:
        server.close()
        shutil.rmtree(folder, ignore_errors=True)
    values |= dataclasses.asdict(outcome) | {"torture_groups_per_s": outcome.groups_per_s}
    report.finish(
        "store",
        title="The store's two engines",
        about=[(__doc__ or "").split("\n\n")[2].replace("\n", " ")],
        table=report.Table(columns=["group", "producers", "engine", "groups/s", "MB/s"], rows=rows),
        remarks=[
            f"Under {outcome.server_kills} kills of the server and {outcome.client_kills} of producers and learner, on "
            f"PostgreSQL: {outcome.trained} of {outcome.issued} groups trained, {outcome.trained_twice} twice, "
            f"{outcome.lost} lost, in {outcome.seconds:.0f} s ({outcome.groups_per_s:.0f} groups/s, kills and restarts "
            "included)."
        ],
        values=values,
        aims={
            "trained_twice": report.Aim(value=outcome.trained_twice, aim=0, at_least=False).to_json(),
            "lost": report.Aim(value=outcome.lost, aim=0, at_least=False).to_json(),
        },
        data={},
        figure=False,
        beside="every process on any core",
    )


if __name__ == "__main__":
    if len(sys.argv) == 4:
        produce(sys.argv[1], SIZES[sys.argv[2]], sys.argv[3])
    else:
        app.run(main)
