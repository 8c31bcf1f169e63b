"""Prefetched snapshot: mapped, and staged by one thread concurrently with generation."""

import ctypes
import logging
import math
import os
import pathlib
import re
import threading
import time
import warnings

import numpy as np
import torch

from actor.vllm.staging import NotStageableError, Staged, StagingStoppedError, stage
from bridge.snapshots.verified_copy import map_tensors
from bridge.weight_types import WeightManifest

_OPENMP = re.compile(r"/.*/lib(?:gomp|iomp5|omp)[-.0-9a-z]*\.so[^/\n ]*$", re.MULTILINE)

logger = logging.getLogger(f"vllm.{__name__}")


class PreparedSnapshot:
    """Mapped snapshot; its file cannot be overwritten while the mapping exists."""

    def __init__(self, path: str, manifest: WeightManifest) -> None:
        """Maps the snapshot. Raises SnapshotError if the snapshot is not at `path`."""
        self.manifest = manifest
        self.tensors = mapped(path, manifest)
        """All tensors by name; empty after `drop`."""
        self._staged: Staged | None = None
        self._retired: list[object] = []
        self._staging, self._stopped = threading.Lock(), threading.Event()

    def stage(self, model: torch.nn.Module) -> None:
        """Stages what it can while the model generates, unless `serve` or `drop` comes first."""
        start, start_cpu = time.perf_counter(), time.thread_time()
        with self._staging:
            if self._stopped.is_set():
                return
            try:
                use_one_idle_core()
                self._staged = stage(model, self.tensors, self._stopped)
            except StagingStoppedError:
                return
            except NotStageableError as e:
                logger.info("version %s is loaded in the pause: %s", self.manifest.version, e)
            except Exception:  # errors in vLLM's code for untested models
                version = self.manifest.version
                logger.warning("version %s could not be staged and is loaded in the pause", version, exc_info=True)
            else:
                wall_s, cpu_s = time.perf_counter() - start, time.thread_time() - start_cpu
                logger.info("version %s staged s=%.3f cpu_s=%.3f", self.manifest.version, wall_s, cpu_s)

    def serve(self) -> frozenset[str]:
        """Swaps the staged tensors in; returns the names of tensors that were not staged, all if unfinished."""
        self._stop()
        if self._staged is None:
            return frozenset(self.tensors)
        self._retired = self._staged.serve()
        return self._staged.left

    def drop(self) -> None:
        """Releases the file and the retired tensors (gigabytes) in another thread."""
        threading.Thread(target=self._drop, name="drop", daemon=True).start()

    def _drop(self) -> None:
        self._stop()
        self._staged = None
        self._retired.clear()
        self.tensors.clear()

    def _stop(self) -> None:
        self._stopped.set()
        with self._staging:  # staging stops soon
            pass


class SnapshotPrefetcher:
    """Holder of the prepared, not yet loaded snapshot: one thread prepares it, another takes it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._prepared: PreparedSnapshot | None = None
        self._late: float = 0
        """Requests up to this number are too late: their snapshot would never be taken, and its file never released."""

    def prepare(self, request: int, path: str, manifest: WeightManifest) -> PreparedSnapshot | None:
        """Maps a snapshot (`mapped`), which replaces the held one; returns None if the request is too late."""
        with self._lock:
            if request <= self._late:
                return None
            self._drop()
            self._prepared = PreparedSnapshot(path, manifest)
            return self._prepared

    def take(self, last_request: int, manifest: WeightManifest) -> PreparedSnapshot | None:
        """Returns the held snapshot if it matches; the caller drops it. Requests up to the last become too late."""
        with self._lock:
            self._late = last_request
            if self._prepared is None or self._prepared.manifest != manifest:
                self._drop()
                return None
            prepared, self._prepared = self._prepared, None
            return prepared

    def drop(self) -> None:
        """Releases the held snapshot and its file."""
        with self._lock:
            self._drop()

    def close(self) -> None:
        """Releases the held snapshot; all later requests are too late."""
        with self._lock:
            self._late = math.inf
            self._drop()

    def _drop(self) -> None:
        if self._prepared is not None:
            self._prepared.drop()
            self._prepared = None


def use_one_idle_core() -> None:
    """Restricts this thread to one OpenMP thread on the engine's cores.

    A thread starts on the core of its creator, here a generating thread, and with as many helpers. OpenMP's setting is
    per thread, whereas torch's `set_num_threads` would affect other threads.
    """
    tasks = [int(task.name) for task in pathlib.Path("/proc/self/task").iterdir()]
    if pinned := {core for cores in map(_cores, tasks) if len(cores) == 1 for core in cores}:
        os.sched_setaffinity(0, pinned)
    torch.get_num_threads()  # otherwise torch passes its own number to OpenMP later
    for library in set(_OPENMP.findall(pathlib.Path("/proc/self/maps").read_text())):
        ctypes.CDLL(library).omp_set_num_threads(1)


def _cores(task: int) -> set[int]:
    try:
        return os.sched_getaffinity(task)
    except ProcessLookupError:  # it has exited
        return set()


def mapped(path: str, manifest: WeightManifest) -> dict[str, torch.Tensor]:
    """Returns views of a snapshot's tensors by name; raises SnapshotError if the snapshot is not at `path`."""
    return {name: _as_torch(array) for name, array in map_tensors(path, manifest).items()}


def _as_torch(array: np.ndarray) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        if array.dtype.name == "bfloat16":  # ml_dtypes' type, which torch rejects
            return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
        return torch.from_numpy(array)
