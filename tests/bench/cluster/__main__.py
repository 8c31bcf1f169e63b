"""The planner's store and network against what is measured, and the figure of what gives out first.

    python -m tests.bench.cluster [--small]

`launch.tools.profile_machine` measures both stores with groups of 3 KB and 2 MB; from that alone the planner predicts
the groups a second of other sizes and numbers of producers, and beside actors that hand nothing in and look as often as
real ones do. Each is then measured, by other clients. A download over a slow link is predicted from the link's rate and
held against `tests.bench.publish`'s. Writes the figure, and, on a machine that was quiet when it
began (no more load than cores), the store that it measured into the figure's profile, `docs/cluster_profile.json`, and
the table of `docs/planning.md` after it. Store, clients and learner share the cores.
"""

import dataclasses
import json
import os
import pathlib
import shutil
import tempfile
from typing import Any

from absl import app

from launch.tools.plan.profile import StoreProfile
from launch.tools.profile_machine.measure_store import measure_store
from tests.bench.cluster.figure import draw
from tests.bench.cluster.measured import Case, groups_per_s, new_store
from tests.bench.cluster.plan_table import keep
from tests.bench.cluster.predicted import predicted_download_s, predicted_groups_per_s
from tests.bench.harness import result
from tests.integration.support.processes import REPO
from tests.postgres import ACTOR, start_server

LINK_BYTES_PER_S = 100_000_000
"""Of `tests/bench/publish/link.py`."""
PROFILE, PAGE = REPO / "docs" / "cluster_profile.json", REPO / "docs" / "planning.md"
CASES = [
    Case(engine=engine, num_samples=k, num_tokens=t, num_producers=n, num_lookers=looking, num_groups=num)
    for engine, lookers in (("sqlite", (0,)), ("postgres", (0, 20, 40)))
    for k, t, num in ((2, 2520, 400), (8, 5000, 150))
    for n, looking in [*((n, 0) for n in (1, 2, 4)), *((2, m) for m in lookers if m)]
]
"""Groups of 66 KB and 520 KB."""


def main(argv: list[str]) -> None:
    """Measures, predicts, compares, draws."""
    del argv
    folder = pathlib.Path(tempfile.mkdtemp(prefix="sluice-bench-"))
    folder.chmod(0o711)  # the user that root's server runs as goes through it
    server = start_server(folder / "postgres")
    rows: list[dict[str, Any]] = []
    stores: dict[str, StoreProfile] = {}
    try:
        for case in CASES[::4] if result.SMALL.value else CASES:
            if case.engine not in stores:
                url = new_store(case.engine, folder, server).learner
                stores[case.engine] = StoreProfile(**measure_store(url, ACTOR, folder))
            measured = groups_per_s(new_store(case.engine, folder, server), case)
            predicted = predicted_groups_per_s(stores[case.engine], case)
            rows.append(dataclasses.asdict(case) | compared(measured, predicted))
            print(rows[-1], flush=True)
    finally:
        server.close()
        shutil.rmtree(folder, ignore_errors=True)
    link = json.loads((result.RESULTS / "publish.json").read_text())["parts"]
    predicted_s = predicted_download_s(link["local 0.3B 1"]["num_bytes"], link_bytes_per_s=LINK_BYTES_PER_S)
    download = compared(link["link 0.3B"]["prefetch_slow_link_s"], predicted_s)
    values = {
        f"worst_factor_{engine}": max(row["factor"] for row in rows if row["engine"] == engine) for engine in stores
    }
    result.finish(
        "cluster",
        __doc__,
        values=values | {"worst_factor_download": download["factor"]},
        aims=dict.fromkeys(values, result.at_most(2.0, "ours, chosen before anything was measured"))
        | {"worst_factor_download": result.at_most(1.25, "ours, chosen before anything was measured")},
        rows=[*rows, {"engine": "seconds of a download over a link of 100 MB/s"} | download],
        columns={
            "store": "{engine}",
            "samples": "{num_samples}",
            "tokens": "{num_tokens}",
            "producers": "{num_producers}",
            "actors that look": "{num_lookers}",
            "measured groups/s": "{measured:.2f}",
            "predicted": "{predicted:.2f}",
            "ratio": "{ratio:.2f}",
        },
        notes=[keep_store(stores["postgres"])],
        beside="every process on any core",
        figure=True,
        stores={name: dataclasses.asdict(store) for name, store in stores.items()},
    )


def compared(measured: float, predicted: float) -> dict[str, float]:
    ratio = predicted / measured
    return {"measured": measured, "predicted": predicted, "ratio": ratio, "factor": max(ratio, 1 / ratio)}


def keep_store(store: StoreProfile) -> str:
    """Draws the figure with the store, and keeps it in the docs if the machine was quiet; returns what was done."""
    profile = json.loads(PROFILE.read_text()) | {"store": dataclasses.asdict(store)}
    said = "The store measured here was not kept."
    if (folder := result.results_folder()) is not None:
        if folder == result.RESULTS:
            load = result.conditions()["load_at_start"]
            said = keep(profile, PROFILE, PAGE, load=load, num_cores=os.cpu_count() or 1)
            profile = json.loads(PROFILE.read_text())
        draw(profile, folder / "cluster.png")
    return said


if __name__ == "__main__":
    app.run(main)
