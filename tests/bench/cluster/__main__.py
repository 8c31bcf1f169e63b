"""The planner's store and network against what is measured, and the figure of what gives out first.

    python -m tests.bench.cluster [--small]

`launch.tools.profile_machine` measures both stores with groups of 3 KB and 2 MB; from that alone the planner predicts
the groups a second of other sizes and numbers of producers, and beside actors that hand nothing in and look as often as
real ones do. Each is then measured, by other clients. A download over a slow link is predicted from the link's rate and
held against `tests.bench.publish`'s. Writes `results/cluster.{json,md,png}`, and, on a machine that was quiet when it
began (no more load than cores), the store that it measured into the figure's profile, `docs/cluster_profile.json`, and
the table of `docs/cluster_plan.md` after it.
"""

import dataclasses
import json
import os
import pathlib
import shutil
import tempfile

from absl import app

from launch.tools.plan.profile import StoreProfile
from launch.tools.profile_machine.measure_store import measure_store
from tests.bench.cluster.figure import draw
from tests.bench.cluster.measured import Case, groups_per_s
from tests.bench.cluster.predicted import predicted_download_s, predicted_groups_per_s
from tests.bench.cluster.said import keep
from tests.bench.rig import report
from tests.integration.support.processes import REPO
from tests.integration.support.store_torture import Urls
from tests.postgres import ACTOR, start_server

WORST_FACTOR, WORST_DOWNLOAD_FACTOR = 2.0, 1.25
"""Aims, chosen before anything was measured: predicted over measured, or the other way round."""
LINK_BYTES_PER_S = 100_000_000
"""Of `tests/bench/publish/link.py`."""
PROFILE, PAGE = REPO / "docs" / "cluster_profile.json", REPO / "docs" / "cluster_plan.md"
COLUMNS = (
    "store",
    "group, samples x tokens",
    "producers",
    "actors that look",
    "measured groups/s",
    "predicted",
    "ratio",
)
ABOUT = (
    "`launch.tools.profile_machine` measured both stores with groups of 3 KB and 2 MB. From that the planner predicted "
    "the groups a second of other sizes and numbers of producers, and beside actors that hand nothing in and look as "
    "often as real ones do; other clients then measured each. The download is `tests.bench.publish`'s, predicted from "
    "the link's rate. Store, clients and learner share the cores."
)
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
    small = report.SMALL.value
    folder = pathlib.Path(tempfile.mkdtemp(prefix="sluice-bench-"))
    folder.chmod(0o711)  # the user that root's server runs as goes through it
    server = start_server(folder / "postgres")
    rows: list[list[str]] = []
    factors: dict[str, list[float]] = {"sqlite": [], "postgres": []}
    stores: dict[str, StoreProfile] = {}
    try:
        for number, case in enumerate(CASES if not small else CASES[::4]):
            if case.engine not in stores:
                learner, _ = server.create_store()
                url = learner if case.engine == "postgres" else f"sqlite:///{folder}/profile.db"
                stores[case.engine] = StoreProfile(**measure_store(url, ACTOR, folder))
            if case.engine == "postgres":
                urls = Urls(**dict(zip(("learner", "actor"), server.create_store(), strict=True)))
            else:
                urls = _file(folder, number)
            measured = groups_per_s(urls, case)
            predicted = predicted_groups_per_s(stores[case.engine], case)
            factors[case.engine].append(max(measured / predicted, predicted / measured))
            size = f"{case.num_samples} x {case.num_tokens}"
            told = [f"{measured:.1f}", f"{predicted:.1f}", f"{predicted / measured:.2f}"]
            rows.append([case.engine, size, str(case.num_producers), str(case.num_lookers), *told])
            print(*rows[-1], flush=True)
    finally:
        server.close()
        shutil.rmtree(folder, ignore_errors=True)
    _finish(stores, rows, factors)


def _file(folder: pathlib.Path, number: int) -> Urls:
    url = f"sqlite:///{folder}/{number}.db"
    return Urls(learner=url, actor=url)


def _finish(stores: dict[str, StoreProfile], rows: list[list[str]], factors: dict[str, list[float]]) -> None:
    link = json.loads((report.RESULTS / "publish.json").read_text())["parts"]
    took_s, num_bytes = link["link 0.3B"]["prefetch_slow_link_s"], link["local 0.3B 1"]["num_bytes"]
    predicted_s = predicted_download_s(num_bytes, link_bytes_per_s=LINK_BYTES_PER_S)
    rows.append(["a link of 100 MB/s", f"{num_bytes:,} bytes", "", "", f"{took_s:.2f} s", f"{predicted_s:.2f} s", ""])
    rows[-1][-1] = f"{predicted_s / took_s:.2f}"
    worst = {engine: max(values) for engine, values in factors.items() if values}
    of_download = max(took_s / predicted_s, predicted_s / took_s)
    profile = json.loads(PROFILE.read_text()) | {"store": dataclasses.asdict(stores["postgres"])}
    kept = "The figure is drawn with the PostgreSQL measured here, which nothing else is told."
    if (folder := report.results_folder()) is not None:
        if folder == report.RESULTS:
            load, num_cores = report.conditions()["load_at_start"], os.cpu_count() or 1
            kept = keep(profile, PROFILE, PAGE, load=load, num_cores=num_cores) + " The figure is drawn with it."
            profile = json.loads(PROFILE.read_text())
        draw(profile, folder / "cluster.png")
    print(kept, flush=True)
    report.finish(
        "cluster",
        title="Store and network: predicted and measured, and what gives out first",
        about=[ABOUT],
        table=report.Table(columns=COLUMNS, rows=rows),
        remarks=[
            "The stores as `launch.tools.profile_machine` found them, seconds of the store's time: "
            + "; ".join(f"{name} {_constants(store)}" for name, store in stores.items())
            + ".",
            f"{kept} `docs/cluster_plan.md` says where the rest of its profile is from.",
        ],
        values={f"worst_factor_{engine}": value for engine, value in worst.items()}
        | {"worst_factor_download": of_download},
        aims={
            f"worst_factor_{engine}": report.Aim(value=value, aim=WORST_FACTOR, at_least=False).to_json()
            for engine, value in worst.items()
        }
        | {"worst_factor_download": report.Aim(value=of_download, aim=WORST_DOWNLOAD_FACTOR, at_least=False).to_json()},
        data={"stores": {name: dataclasses.asdict(store) for name, store in stores.items()}, "rows": rows},
        beside="every process on any core",
    )


def _constants(store: StoreProfile) -> str:
    return ", ".join(f"{name} {value:.3g}" for name, value in dataclasses.asdict(store).items() if name.endswith("_s"))


if __name__ == "__main__":
    app.run(main)
