"""One update at real model shapes on this machine's accelerator: `python -m tests.bench.learner_gpu`.

Random weights of a published shape, bfloat16 compute over float32 masters, rows filled by sequences of lognormal
length, one accumulate and one apply. MFU is taken against the card's own measured bfloat16 matmul rate and, where it
is known, against its published peak (`learner/metrics/flops.py` states what counts as a model FLOP). On a CPU it runs
with a toy shape, to show that it works; such numbers mean nothing.
"""

import dataclasses
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from configs.model_sizes import MODEL_SIZES
from configs.schema import Config
from configs.sections import ModelConfig, OptimizerConfig, PackingConfig, SamplingConfig
from learner.distributed.sharding import make_mesh, param_shardings
from learner.metrics.flops import model_flops, peak_flops
from learner.model.architecture import Architecture as Shape
from learner.model.decoder import abstract_params, init_params
from learner.update.packing import PackedBatch, empty_batch
from learner.update.train_step import TrainStep, build_train_step
from tests.bench.harness import result

MODELS = flags.DEFINE_list("models", ["Qwen3-0.6B", "Qwen3-1.7B"], "Names in configs/model_sizes.py.")
ROWS = flags.DEFINE_integer("rows", 4, "Rows of a micro-batch.")
ROW_TOKENS = flags.DEFINE_integer("row_tokens", 8192, "Tokens of a row.")
ATTENTION = flags.DEFINE_enum("attention", "auto", ["auto", "cudnn", "xla"], "model.attention.")
REMAT = flags.DEFINE_enum("remat", "attention", ["full", "attention", "dots", "none"], "model.remat.")
MAX_ROW_SEQUENCES = flags.DEFINE_integer("max_row_sequences", 16, "packing.max_row_sequences.")
REPEATS = flags.DEFINE_integer("repeats", 10, "Timed updates.")


def toy(shape: Shape) -> Shape:
    """The same family at a size that a CPU can compute."""
    small = dict(hidden_size=64, intermediate_size=96, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=32)
    return dataclasses.replace(shape, vocab_size=512, **small)  # pyright: ignore[reportArgumentType]


def config_of(rows: int, row_tokens: int) -> Config:
    """What is measured; everything not named is the default of a run."""
    return Config(
        preset="bench",
        model=ModelConfig(
            compute_dtype="bfloat16",
            served_dtype="bfloat16",
            remat=REMAT.value,  # pyright: ignore[reportArgumentType]  # an enum flag
            attention=ATTENTION.value,  # pyright: ignore[reportArgumentType]  # another
            max_tokens=row_tokens,
        ),
        sampling=SamplingConfig(max_response_tokens=row_tokens - 1),
        optimizer=OptimizerConfig(learning_rate=1e-6),
        packing=PackingConfig(rows=rows, row_tokens=row_tokens, max_row_sequences=MAX_ROW_SEQUENCES.value),
    )


def filled_batch(packing: PackingConfig, vocab_size: int, seed: int) -> tuple[PackedBatch, float]:
    """Rows full of sequences whose first eighth is the prompt; and the sum of squared lengths."""
    random, shape = np.random.default_rng(seed), (packing.rows, packing.row_tokens)
    positions, segments, mask = np.zeros(shape, np.int32), np.zeros(shape, np.int32), np.zeros(shape, np.bool_)
    squares = 0.0
    for b in range(packing.rows):
        start, segment = 0, 1
        while start < packing.row_tokens:
            length = int(np.clip(random.lognormal(np.log(packing.row_tokens / 6), 0.7), 16, packing.row_tokens))
            length = min(length, packing.row_tokens - start)
            end = start + length
            positions[b, start:end] = np.arange(length)
            segments[b, start:end] = segment
            mask[b, start + max(length // 8, 1) : end] = True
            squares += length**2
            start, segment = end, segment + 1
    advantages = np.where(mask, random.normal(size=shape), 0).astype(np.float32)
    batch = dataclasses.replace(
        empty_batch(packing),
        tokens=random.integers(0, vocab_size, shape).astype(np.int32),
        positions=positions,
        segment_ids=segments,
        loss_mask=mask,
        behavior_logprobs=np.where(mask, -np.log(vocab_size), 0).astype(np.float32),
        advantages=advantages,
        token_weights=mask.astype(np.float32),
        denominator=np.asarray(mask.sum(), np.float32),
    )
    return batch, squares


def matmul_flops_per_s(size: int) -> float:
    """The best of a few bfloat16 products of square matrices."""
    a = jnp.ones((size, size), jnp.bfloat16)
    product = jax.jit(lambda a, b: a @ b)
    product(a, a).block_until_ready()
    times = []
    for _ in range(10):
        start = time.perf_counter()
        product(a, a).block_until_ready()
        times.append(time.perf_counter() - start)
    return 2 * size**3 / min(times)


def update_s(steps: TrainStep, shape: Shape, batch: PackedBatch, mesh: jax.sharding.Mesh) -> float:
    """Median seconds of one accumulate and one apply."""
    make = jax.jit(init_params, static_argnums=0, out_shardings=param_shardings(abstract_params(shape), mesh))
    state, placed = steps.init(make(shape, jax.random.key(0))), steps.put(batch)
    times = []
    for _ in range(REPEATS.value + 2):
        start = time.perf_counter()
        state, metrics = steps.apply(steps.accumulate(state, placed))
        assert np.isfinite(float(metrics["loss"])), "the loss is not finite"  # waits for the step
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


def main(argv: list[str]) -> None:
    """Measures each model and prints the table and the JSON line."""
    del argv
    device = jax.devices()[0]
    on_cpu = device.platform == "cpu"
    rows_of, row_tokens = (2, 128) if on_cpu else (ROWS.value, ROW_TOKENS.value)
    ceiling, peak = matmul_flops_per_s(512 if on_cpu else 8192), peak_flops(device.device_kind)
    values: dict[str, float] = {"matmul_tflops_per_s": ceiling / 1e12}
    rows = []
    for name in MODELS.value:
        shape = Shape.from_hf(MODEL_SIZES[name])
        shape = toy(shape) if on_cpu else shape
        config, mesh = config_of(rows_of, row_tokens), make_mesh(devices=[device])
        batch, squares = filled_batch(config.packing, shape.vocab_size, seed=0)
        seconds = update_s(build_train_step(shape, config, mesh), shape, batch, mesh)
        tokens = int((np.asarray(batch.segment_ids) > 0).sum())
        scored = int(np.asarray(batch.loss_mask).sum())
        flops = model_flops(shape, num_tokens=tokens, num_scored_tokens=scored, sum_squared_lengths=squares)
        rows.append(
            {
                "name": f"{name}{' (toy)' if on_cpu else ''}",
                "update_s": seconds,
                "tokens_per_s": tokens / seconds,
                "tflops_per_s": flops / seconds / 1e12,
                "mfu": flops / seconds / ceiling,
                "of_peak": flops / seconds / peak if peak else None,
            }
        )
        values |= {f"{name}/mfu": rows[-1]["mfu"], f"{name}/tokens_per_s": tokens / seconds}
    result.finish(
        "learner_gpu",
        __doc__,
        values=values,
        aims={f"{name}/mfu": result.at_least(0.5, "ours") for name in MODELS.value},
        rows=rows,
        columns={
            "model": "{name}",
            "s an update": "{update_s:.3f}",
            "real tokens/s": "{tokens_per_s:,.0f}",
            "model TFLOP/s": "{tflops_per_s:.1f}",
            "MFU of the measured matmul rate": "{mfu:.1%}",
            "of the peak": "{of_peak:.1%}",
        },
        notes=[
            f"Bfloat16 matmul {ceiling / 1e12:.1f} TFLOP/s measured, {(peak or 0.0) / 1e12:.0f} published (0 if "
            f"unknown); {rows_of} x {row_tokens} tokens, remat {REMAT.value}, attention {ATTENTION.value}, "
            f"max_row_sequences {MAX_ROW_SEQUENCES.value}."
        ],
        beside=f"{device.device_kind}, nothing else of ours",
        is_whole=not on_cpu,
    )


if __name__ == "__main__":
    app.run(main)
