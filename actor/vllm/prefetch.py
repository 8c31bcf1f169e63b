"""A snapshot between the check and the pause: mapped, and staged beside generation by one thread."""

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
    """A mapped snapshot; while it is one, its file can't be written."""

    def __init__(self, path: str, manifest: WeightManifest) -> None:
        """Maps it.

        Raises:
          SnapshotError: it is not at `path`.
        """
        self.manifest = manifest
        self.tensors = mapped(path, manifest)
        """The whole snapshot, by name; empty once it was dropped."""
        self._staged: Staged | None = None
        self._retired: list[object] = []
        self._staging, self._stopped = threading.Lock(), threading.Event()

    def stage(self, model: torch.nn.Module) -> None:
        """Makes ready what can be, unless `serve` or `drop` comes first; the model goes on generating."""
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
            except Exception:  # vLLM's own code, for a model that it was not tried with
                version = self.manifest.version
                logger.warning("version %s could not be staged and is loaded in the pause", version, exc_info=True)
            else:
                wall_s, cpu_s = time.perf_counter() - start, time.thread_time() - start_cpu
                logger.info("version %s staged s=%.3f cpu_s=%.3f", self.manifest.version, wall_s, cpu_s)

    def serve(self) -> frozenset[str]:
        """Puts what was staged in place of what is served; returns the names of the tensors that it did not hold.

        Of a snapshot that is not ready yet nothing is taken.
        """
        self._stop()
        if self._staged is None:
            return frozenset(self.tensors)
        self._retired = self._staged.serve()
        return self._staged.left

    def drop(self) -> None:
        """Lets go of the file and of what served before, in another thread: it is gigabytes."""
        threading.Thread(target=self._drop, name="drop", daemon=True).start()

    def _drop(self) -> None:
        self._stop()
        self._staged = None
        self._retired.clear()
        self.tensors.clear()

    def _stop(self) -> None:
        self._stopped.set()
        with self._staging:  # soon
            pass


class SnapshotPrefetcher:
    """What is prepared and not loaded yet: one thread puts it here, another takes it."""

    def __init__(self) -> None:
        """Nothing is."""
        self._lock = threading.Lock()
        self._prepared: PreparedSnapshot | None = None
        self._late: float = 0
        """Requests up to this number come too late: nobody would take what they ask for, or let go of its file."""

    def prepare(self, request: int, path: str, manifest: WeightManifest) -> PreparedSnapshot | None:
        """Maps a snapshot in place of the one here; None if the request comes too late.

        Raises:
          SnapshotError: it is not at `path`.
        """
        with self._lock:
            if request <= self._late:
                return None
            self._drop()
            self._prepared = PreparedSnapshot(path, manifest)
            return self._prepared

    def take(self, last_request: int, manifest: WeightManifest) -> PreparedSnapshot | None:
        """The snapshot, for the caller to drop, if it is here; requests up to the last come too late from here on."""
        with self._lock:
            self._late = last_request
            if self._prepared is None or self._prepared.manifest != manifest:
                self._drop()
                return None
            prepared, self._prepared = self._prepared, None
            return prepared

    def drop(self) -> None:
        """Lets go of what is here, and of its file."""
        with self._lock:
            self._drop()

    def close(self) -> None:
        """The same; all requests come too late from here on."""
        with self._lock:
            self._late = math.inf
            self._drop()

    def _drop(self) -> None:
        if self._prepared is not None:
            self._prepared.drop()
            self._prepared = None


def use_one_idle_core() -> None:
    """Lets this thread compute on one core at a time, whichever of the engine's is the least busy.

    A thread begins on the core of the one that started it, which here is one that generates, and with as many
    helpers. What OpenMP has been told is the thread's own; torch's `set_num_threads` would tell others too.
    """
    tasks = [int(task.name) for task in pathlib.Path("/proc/self/task").iterdir()]
    if pinned := {core for cores in map(_cores, tasks) if len(cores) == 1 for core in cores}:
        os.sched_setaffinity(0, pinned)
    torch.get_num_threads()  # or torch tells OpenMP its own number later
    for library in set(_OPENMP.findall(pathlib.Path("/proc/self/maps").read_text())):
        ctypes.CDLL(library).omp_set_num_threads(1)


def _cores(task: int) -> set[int]:
    try:
        return os.sched_getaffinity(task)
    except ProcessLookupError:  # it has ended
        return set()


def mapped(path: str, manifest: WeightManifest) -> dict[str, torch.Tensor]:
    """Views of a snapshot's tensors, by name; nothing is copied.

    Raises:
      SnapshotError: it is not at `path`.
    """
    return {name: _as_torch(array) for name, array in map_tensors(path, manifest).items()}


def _as_torch(array: np.ndarray) -> torch.Tensor:
    """A view; it is never written."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        if array.dtype.name == "bfloat16":  # ml_dtypes' type, which torch does not take
            return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
        return torch.from_numpy(array)
