"""Training cost on this machine: seconds per micro-batch and per optimizer step."""

import dataclasses
import statistics
import time
from collections.abc import Callable

import jax
import numpy as np

from bridge.rollout_types import Group, Rollout
from configs.schema import Config
from learner.model.decoder import Params
from learner.model.routing_replay import RoutingShape
from learner.update.critic_step import Critic
from learner.update.frozen_policies import FrozenPolicies
from learner.update.optimizer import TrainState
from learner.update.packing import MicroBatch, pack_groups
from learner.update.train_step import TrainStep, combine_params

_REPEATS = 5


def profile_learner(
    config: Config,
    steps: TrainStep,
    anchors: FrozenPolicies,
    state: TrainState,
    *,
    base: Params | None = None,
    critic: Critic | None = None,
) -> tuple[dict[str, float], TrainState]:
    """Measures the `learner` part of a profile (`launch/tools/plan/profile.py`) on full micro-batches.

    A device computes whole micro-batches. Seconds per token are therefore those of a gradient pass over all positions,
    as if packing left none empty. The host's part (packing, transfer) is counted per micro-batch. All values are
    medians without compilation. Returns the profile, and the state that replaces the given one, because a second state
    might not fit the devices.
    """
    micro = full_micro_batch(config, steps.routing)
    batch = steps.put(micro.batch)

    def accumulate() -> None:
        nonlocal state
        known = batch if critic is None else critic.accumulate(combine_params(base, state.params), batch)[0]
        state = steps.accumulate(state, known, anchors.score(known, micro.teachers), base)
        jax.block_until_ready(steps.pending)

    def apply() -> None:
        nonlocal state
        state, metrics = steps.apply(state, epoch=config.rounds.epochs - 1)
        of_critic = {} if critic is None else critic.apply(config.rounds.epochs - 1)
        jax.device_get((metrics, of_critic))

    accumulate()
    apply()
    num_tokens = config.packing.rows * config.packing.row_tokens
    profile = {
        "seconds_per_token": config.mesh.num_devices * _median_s(accumulate) / num_tokens,  # chip-seconds
        "micro_batch_s": _median_s(
            lambda: jax.block_until_ready(steps.put(full_micro_batch(config, steps.routing).batch))
        ),
        "micro_batch_tokens": num_tokens,
        "optimizer_step_s": _median_s(apply, before=accumulate),
    }
    return profile, state


def full_micro_batch(config: Config, routing: RoutingShape | None = None) -> MicroBatch:
    """Returns a micro-batch of rows without padding; its tokens have the first teacher with a folder, if any.

    Without captured routing, each token takes the learner's own, which costs the same.
    """
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
        [group],
        packing=dataclasses.replace(config.packing, whole_groups=False),  # two responses need two rows
        loss=config.loss,
        max_response_tokens=config.sampling.max_response_tokens,
        routing=routing,
        teachers=(1,) if config.loss.teacher_folders else (),
    )
    if not config.packing.whole_groups:
        return packed[0]
    batch = packed[0].batch
    return dataclasses.replace(packed[0], batch=dataclasses.replace(batch, group_ids=np.ones_like(batch.segment_ids)))


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
