"""A publisher with a writer that can be held up, and what it put out."""

import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bridge.param_names import flatten
from bridge.snapshots.snapshot_format import latest
from bridge.snapshots.snapshot_writer import SnapshotWriter
from bridge.snapshots.verified_copy import map_tensors
from configs.sections import PublishConfig
from learner.metrics.metric_names import METRICS
from learner.publish.publisher import Publisher
from tests.bridge.snapshots.written import fetch
from tests.learner.streams import MODEL, config_of, fresh_params
from tests.param_tensors import iter_tensors

CONFIG = config_of()
KEYS: dict[str, Any] = {"run": "r", "tokenizer_hash": "t"}
DEADLINE_S = 60.0


class GatedWriter(SnapshotWriter):
    """Begins no version before its gate opens, as behind an actor that is slow to copy."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.gate, self.reached = threading.Event(), threading.Event()

    def begin(self, *args, **kwargs):
        self.reached.set()
        assert self.gate.wait(DEADLINE_S)
        return super().begin(*args, **kwargs)


class Setup:
    """A learner with a publisher whose writer waits at a gate, and all that its destinations were told."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "weights"
        self.writer = GatedWriter(self.folder, **KEYS)
        self.seen: list[str] = []
        """Versions as they came out."""
        self.publishers: list[Publisher] = []

    def publisher(self, *, when_late: Any = "wait", dtype="float32", **given: Any) -> Publisher:
        config = PublishConfig(when="every", when_late=when_late, probe_every_n_publishes=3)
        options: dict[str, Any] = {"announce": lambda a: self.seen.append(str(a.manifest.version))}
        made = Publisher(self.writer, MODEL.param_names, config, incarnation=2, dtype=dtype, **options | given)
        self.publishers.append(made)
        return made

    def tensors(self) -> dict[str, np.ndarray]:
        """What an actor reads, by name."""
        manifest = latest(self.folder)
        assert manifest is not None
        fetch(self.folder, manifest, self.folder.with_name("copy"), **KEYS)
        return {name: np.array(x) for name, x in map_tensors(self.folder.with_name("copy"), manifest).items()}


def fresh_params_on_device():
    return jax.tree.map(jax.numpy.asarray, fresh_params())


def join(published: Publisher) -> bool:
    """Waits for the publisher's thread; whether it ended."""
    assert published._thread is not None
    published._thread.join(DEADLINE_S)
    return not published._thread.is_alive()


def metrics_of(published: Publisher, *names: str) -> list[float]:
    metrics = published.metrics()
    assert metrics.keys() <= METRICS.keys()
    return [metrics[f"publish/{name}"] for name in names]


def wanted_of(params, dtype="float32") -> dict[str, np.ndarray]:
    """Copies, by Hugging Face's names; rounded by numpy."""
    leaves = {path: np.array(x).astype(dtype) for path, x in flatten(params).items()}
    return dict(iter_tensors(MODEL.param_names, leaves))


def assert_same(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    assert got.keys() == want.keys()
    for name, array in want.items():
        assert got[name].dtype == array.dtype
        np.testing.assert_array_equal(got[name], array, err_msg=name)
