"""What the learner compiles, and what it computes beside real tokens. One process, one line of JSON.

    python -m tests.bench.learner.shapes [--quick]

**Compile time**: the first update (accumulate, apply) of a small model less its second one, at 2, 8 and 28 layers;
median of 3, taken in turns, with jax's caches emptied before each and no cache on disk.

**Stream**: 50 updates of 64 groups of 8 responses of lognormal length (median 300 tokens, sigma 0.8) go through
`pack_groups` into micro-batches of 8 rows of 2048 tokens, all groups of an update being ready, as they are when the
learner is what others wait for. Every slot of every micro-batch counts as computed. `in_bursts` is the other case: a
learner that waits, and trains on every 8 groups as soon as they are there. The same stream at a quarter of all
lengths is then trained on by a tiny model, for the number of compilations: the steps' own count, and XLA's, as
jax.monitoring reports it.
"""

import json
import statistics
import sys
from collections.abc import Iterator

import jax
import jax.monitoring
import numpy as np

from bridge.rollout_types import Group, Rollout
from configs.schema import Config
from configs.sections import PackingConfig
from learner.distributed.sharding import make_mesh
from learner.model.architecture import Architecture
from learner.model.decoder import init_params
from learner.update.optimizer import TrainState
from learner.update.packing import MicroBatch, empty_batch, pack_groups
from learner.update.train_step import TrainStep, build_train_step
from tests.bench.learner.ours import config
from tests.bench.peers.race import MAX_FOREIGN, RETRIES
from tests.bench.peers.serve import pin, timed

LAYERS = (2, 8, 28)
COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
ROWS, ROW_TOKENS = 8, 2048
GROUPS_PER_UPDATE, GROUP_SIZE = 64, 8
MEDIAN, SIGMA, MAX_PROMPT = 300, 0.8, 64


def tiny_model(num_layers: int, *, width: int) -> Architecture:
    """A Qwen3 that takes no time to run."""
    return Architecture(
        model_type="qwen3",
        vocab_size=64,
        hidden_size=width,
        intermediate_size=width,
        num_layers=num_layers,
        num_heads=2,
        num_kv_heads=1,
        head_dim=width // 2,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        max_position_embeddings=ROW_TOKENS,
        qkv_bias=False,
        o_bias=False,
    )


def fresh(model: Architecture, settings: Config) -> tuple[TrainStep, TrainState]:
    """Steps that have compiled nothing yet, and a state."""
    steps = build_train_step(model, settings, make_mesh())
    params = jax.jit(init_params, static_argnums=0)(model, jax.random.key(0))
    return steps, jax.block_until_ready(steps.init(params))


def compile_time(num_layers: int) -> dict:
    """Seconds to trace and compile one update, nothing cached, and how much others used of the cores meanwhile."""
    jax.clear_caches()
    settings = config(2, 64)
    steps, state = fresh(tiny_model(num_layers, width=16), settings)
    batch = empty_batch(settings.packing)

    def update() -> None:
        nonlocal state
        state, _ = jax.block_until_ready(steps.apply(steps.accumulate(state, batch)))

    first, second = timed(update), timed(update)
    return {"s": first["s"] - second["s"], "foreign": first["foreign"]}


def undisturbed_compile_time(num_layers: int) -> dict:
    """The least disturbed of up to three."""
    tries = [compile_time(num_layers)]
    while tries[-1]["foreign"] > MAX_FOREIGN and len(tries) <= RETRIES:
        tries.append(compile_time(num_layers))
    return min(tries, key=lambda t: t["foreign"])


def update_groups(seed: int, *, scale: int) -> list[Group]:
    """The groups of one update, all lengths divided by `scale`."""
    rng = np.random.default_rng(seed)
    made = []
    for i in range(GROUPS_PER_UPDATE):
        prompt = np.ones(max(int(rng.integers(16, MAX_PROMPT + 1)) // scale, 1), np.int32)
        rollouts = []
        for _ in range(GROUP_SIZE):
            drawn = min(rng.lognormal(np.log(MEDIAN), SIGMA), ROW_TOKENS - MAX_PROMPT)
            size = max(round(drawn / scale), 1)
            rollouts.append(
                Rollout(
                    tokens=rng.integers(0, 64, size).astype(np.int32),
                    loss_mask=np.ones(size, np.bool_),
                    behavior_logprobs=np.full(size, -4.0, np.float32),
                    token_versions=np.full(size, seed, np.int32),
                    finish="stop",
                    reward=float(rng.normal()),
                )
            )
        made.append(
            Group(
                ticket_id=f"u{seed}g{i}",
                kind="train",
                round=seed,
                order=i,
                prompt_tokens=prompt,
                rollouts=tuple(rollouts),
                incarnation=0,
                actor="bench",
                started_s=0.0,
                finished_s=1.0,
            )
        )
    return made


def micro_batches(groups: list[Group], settings: Config, *, burst: int = GROUPS_PER_UPDATE) -> Iterator[MicroBatch]:
    """The update's micro-batches, as `rollout_stream` makes them when its groups arrive `burst` at a time."""
    for i in range(0, len(groups), burst):
        yield from pack_groups(
            groups[i : i + burst],
            packing=settings.packing,
            loss=settings.loss,
            max_response_tokens=settings.sampling.max_response_tokens,
            ends_update=i + burst >= len(groups),
        )


def computed_per_real_token(num_updates: int, packing: PackingConfig, *, scale: int, burst: int) -> float:
    """Slots of all micro-batches over the tokens of all groups."""
    settings = config(packing.rows, packing.row_tokens)
    slots = real = 0
    for seed in range(num_updates):
        groups = update_groups(seed, scale=scale)
        real += sum(g.num_tokens for g in groups)
        slots += sum(m.batch.tokens.size for m in micro_batches(groups, settings, burst=burst))
    return slots / real


def train_stream(num_updates: int, *, scale: int) -> dict:
    """Trains a tiny model on the stream; what was compiled."""
    settings = config(ROWS, ROW_TOKENS // scale)
    steps, state = fresh(tiny_model(1, width=8), settings)
    compiled: list[float] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, duration_secs, **_: compiled.append(duration_secs) if event == COMPILE_EVENT else None
    )
    shapes, num_micro_batches, after_first, metrics = set(), 0, 0, {}
    for seed in range(num_updates):
        for micro in micro_batches(update_groups(seed, scale=scale), settings):
            shapes.add(tuple((x.shape, str(x.dtype)) for x in jax.tree.leaves(micro.batch)))
            state = steps.accumulate(state, micro.batch)
            num_micro_batches += 1
        state, metrics = jax.block_until_ready(steps.apply(state))
        if seed == 0:
            after_first = len(compiled)
    if float(metrics["skipped_updates"]):
        raise RuntimeError("the stream's updates were skipped; its numbers say nothing")
    return {
        "num_train_shapes": len(shapes),
        "num_compilations": steps.num_compilations,
        "xla_compilations_after_first_update": len(compiled) - after_first,
        "num_micro_batches": num_micro_batches,
    }


def main() -> None:
    """Measures and prints."""
    quick = "--quick" in sys.argv
    num_updates = 5 if quick else 50
    pin()
    compile_time(1)  # imports, and what jax sets up once
    times: dict[int, list[dict]] = {n: [] for n in LAYERS}
    for _ in range(1 if quick else 3):
        for n in LAYERS:
            times[n].append(undisturbed_compile_time(n))
    medians = {n: statistics.median(t["s"] for t in each) for n, each in times.items()}
    packing = PackingConfig(rows=ROWS, row_tokens=ROW_TOKENS)
    values = {
        "compile_s": {str(n): s for n, s in medians.items()},
        "compile_foreign": statistics.median(t["foreign"] for each in times.values() for t in each),
        "compile_28_over_8_layers": medians[28] / medians[8],
        "compile_28_over_2_layers": medians[28] / medians[2],
        "num_updates": num_updates,
        "computed_per_real_token": computed_per_real_token(num_updates, packing, scale=1, burst=GROUPS_PER_UPDATE),
        "computed_per_real_token_in_bursts": computed_per_real_token(num_updates, packing, scale=1, burst=8),
    }
    print(json.dumps(values | train_stream(num_updates, scale=4)))


if __name__ == "__main__":
    main()
