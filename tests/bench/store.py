"""Both engines of the store side by side: groups a second, and what kills of server and clients cost.

    python -m tests.bench.store [--small]

Producers claim tickets and hand groups in; a learner offers tickets, reads groups and acknowledges eight at a time, as
learner and actors do. A group of 64 KB is 2 responses of 2,520 tokens, one of 2 MB 8 of 20,000. Each process is one of
its own; SQLite is a file on the same disk as PostgreSQL's data, and every transaction is on that disk before its call
returns (synchronous=FULL, fsync on). Encoding, checking and decoding groups is part of it.

Then three producers and a learner train 5,000 small groups on PostgreSQL while server and clients are killed 20 times
each (SIGKILL); what was trained, and how often, is read from the learner's own ledger.
"""

import dataclasses
import itertools
import pathlib
import shutil
import statistics
import tempfile
from typing import Any

from absl import app

from bridge import codec
from tests.bench.cluster.measured import Case, groups_per_s, new_store
from tests.bench.harness import result
from tests.bridge.factories import make_group, make_rollout
from tests.integration.support.store_torture import Outcome, torture
from tests.postgres import Server, start_server

REPEATS = 3
SIZES = {"64 KB": (2, 2_520, 600), "2 MB": (8, 20_000, 60)}
"""Of a group: samples, tokens of each, and how many are counted."""


def killed(folder: pathlib.Path, server: Server, *, num_groups: int, kills: int) -> Outcome:
    """The torture's outcome."""

    def kill_server() -> None:
        server.kill()
        server.restart()

    urls = new_store("postgres", folder, server)
    return torture(urls, folder, num_groups=num_groups, client_kills=kills, server_kills=kills, kill_server=kill_server)


def main(argv: list[str]) -> None:
    del argv
    small = result.SMALL.value
    folder = pathlib.Path(tempfile.mkdtemp(prefix="sluice-bench-"))
    folder.chmod(0o711)  # the user that root's server runs as goes through it
    server = start_server(folder / "postgres")
    values: dict[str, float] = {}
    rows: list[dict[str, Any]] = []
    try:
        for size, (num_samples, num_tokens, num_groups) in SIZES.items():
            for num_producers, engine in itertools.product((1, 3), ("sqlite", "postgres")):
                case = Case(
                    engine=engine,
                    num_samples=num_samples,
                    num_tokens=num_tokens,
                    num_producers=num_producers,
                    num_lookers=0,
                    num_groups=num_groups // 20 if small else num_groups,
                    claim_at_once=4,
                )
                speeds = [groups_per_s(new_store(engine, folder, server), case) for _ in range(1 if small else REPEATS)]
                group = make_group(case.ticket(0), rollouts=(make_rollout(num_tokens),) * num_samples)
                num_bytes = len(codec.encode(group, max_bytes=codec.MAX_BYTES))
                mean = statistics.fmean(speeds)
                name = f"{engine}_groups_per_s{'_2mb' if size == '2 MB' else ''}"
                values[name + ("_3_producers" if num_producers > 1 else "")] = mean
                rows.append({"group": size, "producers": num_producers, "engine": engine, "groups_per_s": speeds})
                rows[-1]["mb_per_s"] = mean * num_bytes / 1e6
                print(rows[-1], flush=True)
        (folder / "torture").mkdir()
        outcome = killed(folder / "torture", server, num_groups=200 if small else 5000, kills=2 if small else 20)
    finally:
        server.close()
        shutil.rmtree(folder, ignore_errors=True)
    values |= dataclasses.asdict(outcome) | {"torture_groups_per_s": outcome.groups_per_s}
    result.finish(
        "store",
        __doc__,
        values=values,
        aims={"trained_twice": result.at_most(0), "lost": result.at_most(0)},
        rows=rows,
        columns={
            "group": "{group}",
            "producers": "{producers}",
            "engine": "{engine}",
            "groups/s": "{groups_per_s:.0f}",
            "MB/s": "{mb_per_s:.0f}",
        },
        notes=[
            f"Under {outcome.server_kills} kills of the server and {outcome.client_kills} of producers and learner, on "
            f"PostgreSQL: {outcome.trained} of {outcome.issued} groups trained, {outcome.trained_twice} twice, "
            f"{outcome.lost} lost, in {outcome.seconds:.0f} s, kills and restarts included."
        ],
        beside="every process on any core",
    )


if __name__ == "__main__":
    app.run(main)
