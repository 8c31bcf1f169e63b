"""This learner as a side of the learner bench: `TrainStep.accumulate` and `TrainStep.apply`, as a run uses them.

The batch comes as groups through `pack_groups`. Where a group's sequences have one prompt it is the group's, and shared
(`packing.share_prompts`). Else the first token is, and the rest of each prompt is a part of the rollout that the policy
did not sample (loss_mask False), as in multi-turn rollouts.
"""

import dataclasses
import pathlib

import jax
import numpy as np

from bridge import param_names
from bridge.rollout_types import Group
from configs.schema import Config
from configs.sections import LossConfig, ModelConfig, OptimizerConfig, PackingConfig, RoundsConfig, SamplingConfig
from learner.distributed.sharding import make_mesh, param_shardings
from learner.model import architecture
from learner.model import hf_load as hf_io
from learner.model.decoder import abstract_params
from learner.update.auto_shape import AutoShape
from learner.update.packing import MicroBatch, pack_groups
from learner.update.train_step import TrainStep, build_train_step
from tests.bench.peers import workload
from tests.bench.peers.serve import serve
from tests.bridge.factories import make_group, make_rollout, make_ticket


def groups(batch: workload.Batch) -> list[Group]:
    """The batch as complete groups."""
    made = []
    for first in range(0, len(batch.prompts), workload.GROUP_SIZE):
        rollouts, common = [], batch.prompts[first] if is_one_prompt(batch) else batch.prompts[first][:1]
        for i in range(first, first + workload.GROUP_SIZE):
            rest, response = batch.prompts[i][common.size :], batch.responses[i]
            size = rest.size + response.size
            rollouts.append(
                make_rollout(
                    size,
                    tokens=np.concatenate([rest, response]),
                    loss_mask=np.arange(size) >= rest.size,
                    behavior_logprobs=np.concatenate([np.zeros(rest.size, np.float32), batch.behavior_logprobs[i]]),
                    reward=float(batch.rewards[i]),
                )
            )
        ticket = make_ticket(f"t{first}", order=first, prompt_tokens=common)
        made.append(make_group(ticket, rollouts=tuple(rollouts)))
    return made


def is_one_prompt(batch: workload.Batch) -> bool:
    """Whether the sequences of each group have the same prompt."""
    firsts = (i - i % workload.GROUP_SIZE for i in range(len(batch.prompts)))
    return all(np.array_equal(prompt, batch.prompts[i]) for prompt, i in zip(batch.prompts, firsts, strict=True))


def config(
    rows: int,
    row_tokens: int,
    *,
    auto: bool = False,
    longest: int | None = None,
    groups: int = 2,
    shares_prompts: bool = False,
) -> Config:
    """The bench's configuration: everything that is not about the workload is the default.

    `auto`: rows x row_tokens is the most that a micro-batch may hold, and the learner chooses its shape.
    """
    return Config(
        preset="bench",
        model=ModelConfig(max_tokens=longest or row_tokens),
        sampling=SamplingConfig(max_response_tokens=(longest or row_tokens) - 1),
        packing=PackingConfig(rows=rows, row_tokens=row_tokens, auto=auto, share_prompts=shares_prompts),
        rounds=RoundsConfig(groups_per_round=groups, groups_per_update=groups, samples_per_group=workload.GROUP_SIZE),
        loss=LossConfig(
            name="grpo_clip",
            clip_low=workload.CLIP,
            clip_high=workload.CLIP,
            advantage="grpo",
            advantage_eps=workload.ADVANTAGE_EPS,
            advantage_std="population",
            normalization="token",
        ),
        optimizer=OptimizerConfig(
            learning_rate=workload.LEARNING_RATE,
            beta1=workload.BETA1,
            beta2=workload.BETA2,
            eps=workload.ADAM_EPS,
            weight_decay=0.0,
        ),
    )


def load(folder: pathlib.Path, settings: Config) -> tuple[TrainStep, dict]:
    """The steps and the parameters, placed."""
    mesh = make_mesh()
    model_config = architecture.Architecture.from_hf(folder)
    shardings = param_names.flatten(param_shardings(abstract_params(model_config), mesh))
    _, params = hf_io.load(folder, dtype=np.float32, sharding_fn=lambda path, _: shardings[path])
    return build_train_step(model_config, settings, mesh), params


def micro_batches(batch: workload.Batch) -> tuple[Config, list[MicroBatch]]:
    """One micro-batch of exactly the rows that the packed peers have too; of equal lengths what packing.auto makes."""
    made = groups(batch)
    if batch.row_tokens % 64:
        shares = is_one_prompt(batch)
        settings = config(8, 512, auto=True, longest=batch.row_tokens, groups=len(made), shares_prompts=shares)
    else:
        settings = config(*workload.packed(batch).tokens.shape)
    shape = AutoShape(settings).choose(made, ends_update=True)
    settings = dataclasses.replace(settings, packing=shape)
    made = pack_groups(
        made,
        packing=shape,
        loss=settings.loss,
        max_response_tokens=settings.sampling.max_response_tokens,
        ends_update=True,
    )
    return settings, made


class OurSide:
    """See `tests.bench.peers.serve.Side`."""

    version = f"jax {jax.__version__}"

    def __init__(self, folder: pathlib.Path, batch_name: str) -> None:
        jax.clear_caches()
        settings, made = micro_batches(workload.make_batch(batch_name))
        self._steps, params = load(workload.model_folder(folder, batch_name), settings)
        self._batches = [m.batch for m in made]
        self.shape = settings.packing.rows, settings.packing.row_tokens
        self.slots = sum(np.size(b.tokens) for b in self._batches)
        self.remat = self._steps.remat
        self._state = self._steps.init(params)
        self._metrics = {}
        jax.block_until_ready(self._state)
        self.gradient_bytes = sum(x.nbytes for x in jax.tree.leaves(self._state.accumulator.grads))

    def step(self) -> None:
        for batch in self._batches:
            self._state = self._steps.accumulate(self._state, batch)
        self._state, self._metrics = self._steps.apply(self._state)
        jax.block_until_ready((self._state, self._metrics))

    def numbers(self) -> tuple[float, float]:
        return float(self._metrics["loss"]), float(self._metrics["grad_norm"])


if __name__ == "__main__":
    serve(OurSide)
