"""What training costs on this machine: seconds of a micro-batch and of an optimizer step."""

import pathlib
import statistics
import time
from collections.abc import Callable

import jax
import numpy as np

from bridge.types import Group, Rollout
from configs.schema import Config
from learner.anchors import Anchors
from learner.mesh import make_mesh, param_spec
from learner.model import hf_io
from learner.packing import MicroBatch, pack_groups
from learner.step import Steps

_REPEATS = 5


def profile_learner(config: Config, model_folder: pathlib.Path, steps: Steps) -> dict[str, float]:
    """The `learner` part of a profile (`launch/plan_profile.py`), timed on full micro-batches of the run's shape.

    The device computes a micro-batch whole, so a token's seconds are the gradient pass over all its places, as if
    packing left none empty. The host's part (packing, putting) is a micro-batch's own. Medians, without compilation.
    """
    mesh = make_mesh(**config.mesh.axes, devices=None)

    def load(dtype: str) -> dict:
        _, params = hf_io.load(
            model_folder,
            dtype=dtype,
            sharding_fn=lambda path, shape: jax.sharding.NamedSharding(mesh, param_spec(path, shape, mesh)),
        )
        return params

    state = steps.init(load(config.model.param_dtype))
    anchors = Anchors(steps, config, load_reference=lambda: load(config.model.compute_dtype), params=state.params)
    batch = steps.put(full_micro_batch(config).batch)

    def accumulate() -> None:
        nonlocal state
        state = steps.accumulate(state, batch, anchors.score(batch))
        jax.block_until_ready(steps.in_progress)

    def apply() -> None:
        nonlocal state
        state, metrics = steps.apply(state)
        jax.device_get(metrics)

    accumulate()
    apply()
    num_tokens = config.packing.rows * config.packing.row_tokens
    return {
        "seconds_per_token": _median_s(accumulate) / num_tokens,
        "micro_batch_s": _median_s(lambda: jax.block_until_ready(steps.put(full_micro_batch(config).batch))),
        "micro_batch_tokens": num_tokens,
        "optimizer_step_s": _median_s(apply, before=accumulate),
    }


def full_micro_batch(config: Config) -> MicroBatch:
    """A micro-batch of rows without padding: what a run's groups become when they are packed well."""
    rows, row_tokens = config.packing.rows, config.packing.row_tokens
    response = min(config.sampling.max_response_tokens, row_tokens - 1)
    rollouts = tuple(_rollout(response, float(i % 2)) for i in range(max(2, rows)))
    group = Group(
        ticket_id="profile",
        kind="train",
        round=0,
        order=0,
        prompt_tokens=np.ones(row_tokens - response, np.int32),
        rollouts=rollouts,
        incarnation=0,
        actor="profile",
        started_s=0.0,
        finished_s=0.0,
    )
    packed = pack_groups(
        [group], packing=config.packing, loss=config.loss, max_response_tokens=config.sampling.max_response_tokens
    )
    return packed[0]


def _rollout(size: int, reward: float) -> Rollout:
    return Rollout(
        tokens=np.ones(size, np.int32),
        loss_mask=np.ones(size, np.bool_),
        behavior_logprobs=np.full(size, -1.0, np.float32),
        token_versions=np.zeros(size, np.int32),
        finish="length",
        reward=reward,
    )


def _median_s(call: Callable[[], None], *, before: Callable[[], None] = lambda: None) -> float:
    times = []
    for _ in range(_REPEATS):
        before()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
