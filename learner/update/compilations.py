"""Traces of a step's jitted functions, and reports of their compilation."""

import collections
import contextlib
import ctypes
import time
from collections.abc import Iterator

from absl import logging

from bridge.liveness import end_phase, report_phase
from learner.update.packing import PackedBatch


def give_back_free_memory() -> None:
    """Returns free memory of malloc to the system; does nothing if the C library has no such call.

    The compilation of the learner's steps leaves much free memory, which the process would otherwise keep.
    """
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except (OSError, AttributeError):  # not glibc
        return


class Compilations:
    """Counter of the traces of a step's functions, one per batch shape."""

    def __init__(self) -> None:
        self._num_traces: collections.Counter[str] = collections.Counter()
        self._num_tidied = 0

    @property
    def total(self) -> int:
        """Cumulative number of traces."""
        return self._num_traces.total()

    def count(self, name: str) -> None:
        """Counts a trace; call it in the body of the traced function."""
        self._num_traces[name] += 1

    @contextlib.contextmanager
    def reported(self, name: str, batch: PackedBatch | None = None) -> Iterator[None]:
        """Reports the compilation of a function at its first call, which may take minutes, and logs its duration.

        Frees memory that the compiler left, after a call that compiled.
        """
        if self._num_traces[name]:
            yield
        else:
            shape = "" if batch is None else f" ({' x '.join(map(str, batch.tokens.shape))} tokens)"
            report_phase(f"compiling {name}{shape}")
            start_s = time.monotonic()
            yield
            logging.info("compiled %s%s compile_s=%.1f", name, shape, time.monotonic() - start_s)
            end_phase()
        if self.total > self._num_tidied:
            self._num_tidied = self.total
            give_back_free_memory()
