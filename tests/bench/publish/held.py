"""How long publishing holds the learner up, and how much slower its micro-batches are beside it.

    python -m tests.bench.publish.held SIZE

The learner's calls in the loop's order, on this machine's CPU: micro-batches (a forward pass through the size's own
kernels), an optimizer step that has its parameters donated, `publish`. Every other update is published, so
that there are micro-batches beside a publish and others.
"""

import functools
import statistics
import sys
import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp

from bridge.param_names import flatten
from bridge.snapshots.snapshot_writer import SnapshotWriter
from configs.sections import PublishConfig
from learner.model.decoder import Params
from learner.publish.publisher import Publisher
from tests.bench.harness.parts import print_measured
from tests.bench.publish.sizes import SIZES, make_params

NUM_UPDATES = 12
MICRO_BATCHES = 3
ROWS = 128


@jax.jit
def micro_batch(params: Params, x: jax.Array) -> jax.Array:
    """A sum over the hidden states after all layers: reads every kernel, as a forward pass does."""

    def layer(x: jax.Array, kernels: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        x = x + jnp.tanh(x @ kernels["q_proj/kernel"].T) @ kernels["o_proj/kernel"].T
        up = jnp.tanh(x @ kernels["up_proj/kernel"].T) * (x @ kernels["gate_proj/kernel"].T)
        return jnp.tanh(x + up @ kernels["down_proj/kernel"].T), None

    leaves = flatten(params)
    kernels = {
        p.removeprefix("layers/"): leaf for p, leaf in leaves.items() if p.startswith("layers/") and leaf.ndim > 2
    }
    return jnp.sum(jax.lax.scan(layer, x, kernels)[0])


@functools.partial(jax.jit, donate_argnums=0)
def optimizer_step(params: Params) -> Params:
    """Other parameters in the memory of these."""
    return jax.tree.map(lambda x: x * 0.9999, params)


def measure(size_name: str) -> dict[str, Any]:
    """Seconds, and the share."""
    size = SIZES[size_name]
    params = make_params(size)
    x = jax.random.normal(jax.random.key(1), (ROWS, size.hidden))
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        writer = SnapshotWriter(f"{folder}/weights", run="bench", tokenizer_hash="t")
        config = PublishConfig(when="every", every_n_steps=2)
        publisher = Publisher(writer, size.names, config, incarnation=0, dtype="bfloat16")
        held_s, publish_s, step_s = [], [], []
        micro_s: dict[bool, list[float]] = {True: [], False: []}
        for step in range(NUM_UPDATES):
            for _ in range(MICRO_BATCHES):
                is_beside = publisher.announced_version != publisher.version
                start = time.perf_counter()
                micro_batch(params, x).block_until_ready()
                if step > 3:  # compiled, and the slots are warm
                    micro_s[is_beside].append(time.perf_counter() - start)
            if step > 3 and step % 2:
                publisher.finish()
                metrics = publisher.metrics()
                held_s.append(metrics["time/publish_blocked_s"])
                publish_s.append(metrics["time/publish_s"])
            start = time.perf_counter()
            params = jax.block_until_ready(optimizer_step(params))
            step_s.append(time.perf_counter() - start)
            if publisher.is_due(step=step, ends_round=False):
                publisher.publish(params, step=step)
        publisher.finish()
        publisher.close()
    shares = [held / whole for held, whole in zip(held_s, publish_s, strict=True)]
    beside, alone = (statistics.median(micro_s[k]) if micro_s[k] else float("nan") for k in (True, False))
    return {
        "learner_held_up_share": statistics.median(shares),
        "held_up_s": statistics.median(held_s),
        "held_up_worst_s": max(held_s),
        "publish_s": statistics.median(publish_s),
        "micro_batch_beside_s": beside,
        "micro_batch_alone_s": alone,
        "slowdown_beside": beside / alone,
        "optimizer_step_s": statistics.median(step_s[4:]),
    }


if __name__ == "__main__":
    print_measured(measure, sys.argv[1])
