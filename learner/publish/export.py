"""The parameters as they leave the learner: in memory that the optimizer can't change, on their way to the host."""

import functools

import jax
import numpy as np

from bridge.names import ParamNames, flatten
from learner.model.decoder import Params


class Export:
    """One version's parameters. Who holds one keeps their memory; `let_go` gives it back."""

    def __init__(self, params: Params, dtype: str, *, in_place: bool) -> None:
        """Starts the way to the host and returns at once.

        A device casts into a buffer of its own, after whatever it was asked to do before, and the copy to the host
        starts when that is done; the next optimizer step may have the parameters. With several devices each casts its
        part. The memory of a single CPU device is the host's: nothing is copied, the parameters are read where they
        lie and cast on the way into the snapshot (0.7 of a memcpy's speed, against 0.4 with a buffer in between).

        Args:
          params: the learner's.
          dtype: what is served, float32 or bfloat16.
          in_place: whether a CPU's parameters may stay where they are. An optimizer step finds them held then; XLA
            leaves held memory alone and makes the new parameters elsewhere, which costs it time and memory.
        """
        self.is_in_place = in_place and _is_host_memory(params)
        if self.is_in_place:
            self._params: Params | None = jax.tree.map(np.asarray, params)
        else:
            self._params = _cast(params, dtype=dtype)
            for leaf in jax.tree.leaves(self._params):
                leaf.copy_to_host_async()

    def tensors(self, names: ParamNames) -> dict[str, np.ndarray]:
        """Hugging Face name -> host array, a part of a leaf; waits for the copy, without Python's lock."""
        return dict(names.iter_tensors(flatten(jax.tree.map(np.asarray, self._params))))

    def let_go(self) -> None:
        """Forgets the parameters."""
        self._params = None


def _is_host_memory(params: Params) -> bool:
    devices = {device for leaf in jax.tree.leaves(params) for device in leaf.devices()}
    return len(devices) == 1 and all(device.platform == "cpu" for device in devices)


@functools.partial(jax.jit, static_argnames="dtype")
def _cast(params: Params, *, dtype: str) -> Params:
    # Also where the dtype is the same: without donation XLA writes what it returns into new memory.
    return jax.tree.map(lambda x: x.astype(dtype), params)
