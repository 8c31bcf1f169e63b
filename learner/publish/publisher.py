"""Publishes weights: cast to the served dtype on the way into shared memory, in one pass.

Leaves are stacked in Hugging Face's layout, so a tensor is a contiguous slice of a leaf and nothing is
transposed (docs/publishing_and_proof.md).
"""

import functools
import time

import jax
import numpy as np

from bridge.names import ParamNames, flatten
from bridge.snapshots.writer import SnapshotWriter
from bridge.types import Version, WeightManifest
from configs.sections import PublishConfig
from learner.model.decoder import Params


class Publisher:
    """Writes a snapshot of the params under a version and announces it."""

    def __init__(
        self,
        writer: SnapshotWriter,
        names: ParamNames,
        config: PublishConfig,
        *,
        incarnation: int,
        dtype: str,
    ) -> None:
        """`dtype` is what is served: float32 or bfloat16."""
        self._writer = writer
        self._names = names
        self._config = config
        self._incarnation = incarnation
        self._dtype = dtype
        self.version: Version | None = None
        """The last one announced."""
        self.last_publish_s = 0.0
        self.num_publishes = 0

    def is_due(self, *, step: int, ends_round: bool) -> bool:
        """Whether the weights of `step` go out."""
        if self._config.when == "round_end":
            return ends_round
        return step % self._config.every_n_steps == 0

    def serves(self, step: int) -> bool:
        """Whether the weights last announced are those of `step`."""
        return self.version is not None and self.version.step == step

    @property
    def probe_is_due(self) -> bool:
        """Whether the publish just made is one to probe."""
        n = self._config.probe_every_n_publishes
        return n > 0 and (self.num_publishes - 1) % n == 0

    def publish(self, params: Params, *, step: int) -> WeightManifest:
        """Exports, writes, hashes and announces; returns when actors can read it."""
        start = time.perf_counter()
        version = Version(incarnation=self._incarnation, step=step)
        tensors = dict(self._names.iter_tensors(flatten(_to_host(params, self._dtype))))
        manifest = self._writer.write(version, tensors, dtype=self._dtype)
        self.version = version
        self.num_publishes += 1
        self.last_publish_s = time.perf_counter() - start
        return manifest

    def close(self) -> None:
        """Frees the shared memory; actors keep what they serve."""
        self._writer.remove()


def _to_host(params: Params, dtype: str) -> Params:
    """The params as host arrays: what an accelerator sends is cast there first, a CPU's memory is just viewed."""
    on_cpu = jax.default_backend() == "cpu"
    return jax.tree.map(np.asarray, params if on_cpu else _cast(params, dtype=dtype))


@functools.partial(jax.jit, static_argnames="dtype")
def _cast(params: Params, *, dtype: str) -> Params:
    return jax.tree.map(lambda x: x.astype(dtype), params)
