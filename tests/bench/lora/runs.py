"""The cases, a run of one with what was seen of its versions, and what the page says of them."""

import contextlib
import dataclasses
import json
import math
import pathlib
import statistics
import threading
import time
from collections.abc import Generator, Mapping
from typing import Any

import psutil

from bridge.snapshots.snapshot_format import latest
from bridge.weight_types import WeightManifest
from configs.overrides import load_preset
from tests.bench.real_model.watched import look_at_memory, run_for
from tests.bench.rig import report

RECIPE = "arithmetic_smollm2"
TINY = "tiny"
_LOOK_S, _MEMORY_S = 0.1, 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A way to train and to publish."""

    name: str
    about: str
    is_lora: bool
    publishes: str = "merged"


CASES = (
    Case(name="full", about="all parameters are trained", is_lora=False),
    Case(name="merged", about="adapters, published added to the base, ten times the learning rate", is_lora=True),
    Case(name="adapter", about="the same adapters, published alone", is_lora=True, publishes="adapter"),
)
ADAPTER_RATE = 10.0
"""Times the recipe's learning rate: adapters want about ten times as much (Schulman et al., 2025, "LoRA without
regret")."""
AIM_PARITY = 1e-4
"""Nats; the bound at which an actor of float32 is fenced."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """What the page says of one run."""

    case: str
    num_steps: int
    num_samples: int
    held_out: list[tuple[int, float]]
    """Step and mean reward."""
    version_bytes: int
    delta_bytes: float | None
    """Median over the versions that had one."""
    num_versions: int
    update_s: float
    pause_s: float
    prefetch_s: float
    num_probes: int
    max_abs_dlogprob: float
    learner_peak_bytes: float
    """Without the snapshot server, which is a process below it."""
    server_peak_bytes: float
    actor_peak_bytes: float
    checkpoint_bytes: int
    wall_s: float

    @property
    def gain(self) -> float:
        return self.held_out[-1][1] - self.held_out[0][1]


def play(case: Case, config: str, overrides: Mapping[str, object], folder: pathlib.Path, *, rank: int) -> Run:
    """A run, or what is left of it."""
    snapshots = folder.with_name(f"{folder.name}-snapshots")
    own = fields_of(case, config, overrides, snapshots, rank=rank)
    snapshots.mkdir(parents=True, exist_ok=True)
    kept = folder.with_name(f"{folder.name}-seen.json")
    with _watched(snapshots, kept):
        rows, seen = run_for(config, own, folder, bound_s=math.inf)
    found = json.loads(kept.read_text())
    return _run_of(case, rows, {**seen, **found["peaks"]}, found["versions"], folder)


def fields_of(
    case: Case, config: str, overrides: Mapping[str, object], snapshots: pathlib.Path, *, rank: int
) -> dict[str, object]:
    """What a case sets beside its config."""
    num_updates = int(str(overrides["run.num_updates"]))
    own: dict[str, object] = {
        **overrides,
        "publish.probe_every_n_publishes": 1,
        "publish.snapshot_dir": snapshots,
        # Deltas are made where versions leave the machine.
        "publish.serve": "http",
        "checkpoint.every_n_steps": num_updates,
        "evaluation.every_n_steps": max(1, num_updates // 2),
    }
    if case.is_lora:
        own |= {"lora.rank": rank, "lora.alpha": 2.0 * rank, "publish.lora": case.publishes}
        if config != TINY:  # its rate is large already
            rate = load_preset(config).optimizer.learning_rate
            own["optimizer.learning_rate"] = ADAPTER_RATE * rate
    return own


def _run_of(
    case: Case, rows: list[dict[str, Any]], seen: Mapping[str, float], versions: dict[str, Any], folder: pathlib.Path
) -> Run:
    steps = [row for row in rows if row["kind"] == "step"]
    probes = [row["parity/max_abs_dlogprob"] for row in rows if row["kind"] == "probe"]
    deltas = [v["delta"] for v in versions.values() if v["delta"] is not None]

    def mean(name: str) -> float:
        values = [row[name] for row in steps if row.get(name) is not None]
        return statistics.fmean(values) if values else float("nan")

    return Run(
        case=case.name,
        num_steps=len(steps),
        num_samples=round(sum(row["sequences"] for row in steps)),
        held_out=[(row["step"], row["eval/reward"]) for row in rows if row["kind"] == "eval"],
        version_bytes=max(v["full"] for v in versions.values()),
        delta_bytes=statistics.median(deltas) if deltas else None,
        num_versions=len(versions),
        update_s=mean("time/step_s"),
        pause_s=mean("actor/pause_s"),
        prefetch_s=mean("actor/prefetch_s"),
        num_probes=len(probes),
        max_abs_dlogprob=max(probes),
        learner_peak_bytes=seen["learner_peak_bytes"],
        server_peak_bytes=seen["server_peak_bytes"],
        actor_peak_bytes=seen["actor_peak_bytes"],
        checkpoint_bytes=_largest_checkpoint(folder),
        wall_s=seen["wall_s"],
    )


def _largest_checkpoint(folder: pathlib.Path) -> int:
    steps = (folder / "checkpoints").glob("*")
    return max(sum(f.stat().st_size for f in step.rglob("*") if f.is_file()) for step in steps)


@contextlib.contextmanager
def _watched(snapshots: pathlib.Path, kept: pathlib.Path) -> Generator[None]:
    """While it is open, notes versions' bytes and the learner's memory; an earlier run's stay where none runs."""
    found: dict[str, dict[str, int | None]] = {}
    memory = LearnerMemory()
    is_over = threading.Event()

    def look() -> None:
        for folder in [snapshots, *(p for p in snapshots.rglob("*") if p.is_dir())]:
            with contextlib.suppress(Exception):  # it is being replaced
                manifest = latest(folder)
                if manifest is not None:
                    found[str(manifest.version)] = _bytes_of(manifest)

    def watch() -> None:
        looked = -math.inf
        while not is_over.wait(_LOOK_S):
            look()
            if time.monotonic() - looked >= _MEMORY_S:
                memory.look(psutil.Process())
                looked = time.monotonic()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
    if found:
        kept.write_text(json.dumps({"versions": found, "peaks": memory.peaks()}))


class LearnerMemory:
    """Peaks of the learner's processes, without those of the snapshot server, which is a process below the learner."""

    def __init__(self) -> None:
        """Has seen none."""
        self._peaks: dict[tuple[str, int], int] = {}
        self._servers: set[int] = set()

    def look(self, job: psutil.Process) -> None:
        """Enters what there is below a process."""
        look_at_memory(job, self._peaks)
        with contextlib.suppress(psutil.Error):  # one has ended
            self._servers |= {
                p.pid for p in job.children(recursive=True) if "launch.services.snapshot_server" in p.cmdline()
            }

    def peaks(self) -> dict[str, float]:
        """Sums over the processes that were ever there, by what is counted, as `run_for` names them."""
        of_learner = {pid: size for (role, pid), size in self._peaks.items() if role == "learner"}
        servers = sum(size for pid, size in of_learner.items() if pid in self._servers)
        return {"learner_peak_bytes": float(sum(of_learner.values()) - servers), "server_peak_bytes": float(servers)}


def _bytes_of(manifest: WeightManifest) -> dict[str, int | None]:
    deltas = [piece.delta.num_bytes for piece in manifest.shards if piece.delta is not None]
    return {"full": manifest.num_bytes, "delta": sum(deltas) if deltas else None}


def table_of(runs: list[Run]) -> report.Table:
    """A line a run."""
    columns = ["case", "updates", "samples", "held-out by update", "gain", "MB a version", "MB a delta", "fetch, s"]
    columns += [
        "pause, s",
        "s an update",
        "learner GiB",
        "actor GiB",
        "MB a checkpoint",
        "probes",
        "max dlogprob, nats",
    ]
    lines = [
        [
            run.case,
            str(run.num_steps),
            str(run.num_samples),
            ", ".join(f"{step}: {reward:.2f}" for step, reward in run.held_out),
            f"{run.gain:+.3f}",
            f"{run.version_bytes / 1e6:.2f}",
            "-" if run.delta_bytes is None else f"{run.delta_bytes / 1e6:.2f}",
            f"{run.prefetch_s:.2f}",
            f"{run.pause_s:.2f}",
            f"{run.update_s:.1f}",
            f"{run.learner_peak_bytes / 2**30:.2f}",
            f"{run.actor_peak_bytes / 2**30:.2f}",
            f"{run.checkpoint_bytes / 1e6:.1f}",
            str(run.num_probes),
            f"{run.max_abs_dlogprob:.1e}",
        ]
        for run in runs
    ]
    return report.Table(columns=columns, rows=lines)


def values_of(runs: list[Run]) -> dict[str, Any]:
    """Of each case its gain, bytes and memory, and the largest difference of all."""
    values: dict[str, Any] = {}
    for run in runs:
        values |= {
            f"gain_{run.case}": run.gain,
            f"version_bytes_{run.case}": run.version_bytes,
            f"delta_bytes_{run.case}": run.delta_bytes,
            f"learner_peak_bytes_{run.case}": run.learner_peak_bytes,
            f"actor_peak_bytes_{run.case}": run.actor_peak_bytes,
            f"checkpoint_bytes_{run.case}": run.checkpoint_bytes,
            f"update_s_{run.case}": run.update_s,
            f"pause_s_{run.case}": run.pause_s,
        }
    return values | {"max_abs_dlogprob": max(run.max_abs_dlogprob for run in runs)}


def aims_of(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What was wanted: about full training's gain, a publish and a checkpoint of megabytes, and less memory."""
    aims = {"max_abs_dlogprob": report.Aim(value=values["max_abs_dlogprob"], aim=AIM_PARITY, at_least=False).to_json()}
    if {"gain_full", "gain_adapter"} <= values.keys():
        aims |= {
            "gain_adapter_below_full": report.Aim(
                value=values["gain_full"] - values["gain_adapter"], aim=0.1, at_least=False
            ).to_json(),
            "bytes_ratio": report.Aim(
                value=values["version_bytes_adapter"] / values["version_bytes_full"], aim=0.05, at_least=False
            ).to_json(),
            "learner_memory_ratio": report.Aim(
                value=values["learner_peak_bytes_adapter"] / values["learner_peak_bytes_full"], aim=0.75, at_least=False
            ).to_json(),
        }
    return aims
