"""Full training with parameters in bfloat16 against float32: how far the weights move, and what is learned.

    python -m launch.tools.get_model smollm2 --out=models/smollm2
    python -m tests.bench.param_dtype --model=models/smollm2

No engine: fixed groups of right and wrong answers to sums go through the learner's own steps, so both sides see the
same data. Both start from the same weights, rounded to bfloat16. Of the float32 side's movement d and the other's b,
`movement_part` is <b, d> / <d, d>: 1 where every expected step arrives. `gain` is what the log-probability of a right
answer's token rises over a wrong one's, in nats; held-out sums are asked as well.
"""

import dataclasses
import gc
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import ml_dtypes
import numpy as np
from absl import app, flags
from tokenizers import Tokenizer

from bridge.rollout_types import Group
from configs import schema, sections
from learner.distributed.sharding import make_mesh
from learner.model import hf_load as hf_io
from learner.update.packing import PackedBatch, pack_groups
from learner.update.train_step import TrainStep, build_train_step
from tests.bench.harness import result
from tests.bridge.factories import make_group, make_rollout, make_ticket

_MODEL = flags.DEFINE_string("model", None, "A Hugging Face folder.", required=True)
_UPDATES = flags.DEFINE_integer("updates", 30, "Of each side.", lower_bound=1)
NUM_BATCHES, GROUPS_PER_BATCH = 10, 4
BETA2, LEARNING_RATE = 0.999, 1e-6


def main(argv: list[str]) -> None:
    """Trains both, writes the results, prints the JSON line."""
    del argv
    folder, num_updates = pathlib.Path(_MODEL.value), _UPDATES.value
    values: dict[str, float] = {"updates": num_updates, "learning_rate": LEARNING_RATE, "beta2": BETA2}
    movements, rows = [], []
    for dtype in ("float32", "bfloat16"):
        moved, measured = _run(dtype, folder, num_updates)
        movements.append(moved)
        rows.append({"dtype": dtype, **measured})
        values |= {f"{name}_{dtype}": value for name, value in measured.items()}
    exact, moved = movements
    norms = sum(float(np.vdot(d, d)) for d in exact)
    values["movement_part"] = sum(float(np.vdot(b, d)) for b, d in zip(moved, exact, strict=True)) / norms
    values["gain_part"] = values["gain_bfloat16"] / values["gain_float32"]
    values["held_out_gain_part"] = values["held_out_gain_bfloat16"] / values["held_out_gain_float32"]
    result.finish(
        "param_dtype",
        __doc__,
        values=values,
        aims=dict.fromkeys(("movement_part", "gain_part", "held_out_gain_part"), result.within(0.9, 1.1, "ours")),
        rows=rows,
        columns={
            "parameters": "{dtype}",
            "gain, nats": "{gain:.4f}",
            "held-out gain, nats": "{held_out_gain:.4f}",
            "share of parameters moved": "{moved_share:.3f}",
            "rms of movement": "{moved_rms:.2e}",
        },
        beside="the learner alone",
    )


def _run(dtype: Any, folder: pathlib.Path, num_updates: int) -> tuple[list[np.ndarray], dict[str, float]]:
    """The movement of each array, and what was measured on the way."""
    config = _config(dtype, num_updates)
    architecture, loaded = hf_io.load(folder, dtype="float32")
    start = jax.tree.map(lambda p: np.asarray(p).astype(ml_dtypes.bfloat16), loaded)
    del loaded
    steps = build_train_step(architecture, config, make_mesh(devices=jax.devices()[:1]))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    state = steps.init(jax.tree.map(lambda p: p.astype(dtype), start))
    batches, held_out = (
        [_with_logprobs(steps, state.params, batch) for batch in _batches(tokenizer, config, seed)] for seed in (0, 1)
    )
    before = [_margin(steps, state.params, some) for some in (batches, held_out)]
    for n in range(num_updates):
        state = steps.accumulate(state, batches[n % len(batches)])
        state, metrics = steps.apply(state)
        print(f"{dtype} update {n}: grad_norm={float(metrics['grad_norm']):.4f}", flush=True)
    after = [_margin(steps, state.params, some) for some in (batches, held_out)]
    moved: list[np.ndarray] = []
    for end, begin in zip(jax.tree.leaves(state.params), jax.tree.leaves(start), strict=True):
        moved.append(np.asarray(end).astype(np.float32) - begin.astype(np.float32))
    num_all = sum(m.size for m in moved)
    measured = {
        "gain": after[0] - before[0],
        "held_out_gain": after[1] - before[1],
        "moved_share": sum(int(np.count_nonzero(m)) for m in moved) / num_all,
        "moved_rms": float(np.sqrt(sum(float(np.vdot(m, m)) for m in moved) / num_all)),
    }
    del state, steps
    gc.collect()
    return moved, measured


def _config(dtype: Any, num_updates: int) -> schema.Config:
    return schema.Config(
        preset="bench",
        run=sections.RunConfig(num_updates=num_updates),
        rounds=sections.RoundsConfig(groups_per_round=4, groups_per_update=4, samples_per_group=2),
        model=sections.ModelConfig(max_tokens=32, param_dtype=dtype, remat="full"),
        sampling=sections.SamplingConfig(max_response_tokens=8),
        loss=sections.LossConfig(name="truncated_is", max_weight=5.0),
        optimizer=sections.OptimizerConfig(learning_rate=LEARNING_RATE, beta2=BETA2),
        packing=sections.PackingConfig(rows=1, row_tokens=256),
    )


def _batches(tokenizer: Tokenizer, config: schema.Config, seed: int) -> Iterator[PackedBatch]:
    rng = np.random.default_rng(seed)
    for number in range(NUM_BATCHES):
        groups = [_group(tokenizer, rng, f"{seed}-{number}-{i}") for i in range(GROUPS_PER_BATCH)]
        (micro,) = pack_groups(
            groups,
            packing=config.packing,
            loss=config.loss,
            max_response_tokens=config.sampling.max_response_tokens,
        )
        yield micro.batch


def _group(tokenizer: Tokenizer, rng: np.random.Generator, name: str) -> Group:
    a, b = (int(x) for x in rng.integers(10, 90, 2))
    answers = {str(a + b): 1.0, str(a + b + int(rng.integers(1, 9))): 0.0}
    prompt = np.asarray(tokenizer.encode(f"What is {a} + {b}?").ids, np.int32)
    rollouts = [
        # The logprobs are to be the first policy's own, once it is there.
        make_rollout(len(ids), tokens=np.asarray(ids, np.int32), reward=reward)
        for ids, reward in ((tokenizer.encode(f" {text}.").ids, reward) for text, reward in answers.items())
    ]
    return make_group(make_ticket(name, prompt_tokens=prompt), rollouts=tuple(rollouts))


def _with_logprobs(steps: TrainStep, params: Any, batch: PackedBatch) -> PackedBatch:
    return dataclasses.replace(batch, behavior_logprobs=np.asarray(steps.score(params, batch)))


def _margin(steps: TrainStep, params: Any, batches: list[PackedBatch]) -> float:
    """Mean log-probability of right answers' tokens less that of wrong ones', in nats a token."""
    right, wrong = [], []
    for batch in batches:
        logprobs, mask = np.asarray(steps.score(params, batch)), np.asarray(batch.loss_mask)
        right.append(logprobs[mask & (np.asarray(batch.advantages) > 0)])
        wrong.append(logprobs[mask & (np.asarray(batch.advantages) < 0)])
    return float(np.concatenate(right).mean() - np.concatenate(wrong).mean())


if __name__ == "__main__":
    app.run(main)
