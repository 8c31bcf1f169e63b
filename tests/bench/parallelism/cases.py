"""Cases of the bench: those in sight while the rule was designed, and those held out."""

import dataclasses

import numpy as np

from tests.bench.parallelism.simulation import GROWING, Case

FIGURE_12 = tuple(Case(name=f"Figure 12, {kv // 1000}k", kv_tokens=kv) for kv in (60_000, 100_000, 224_000))


def _noisy(deviation: float, seed: int) -> tuple[int, ...]:
    """Returns lengths around 16k that rise and fall by chance."""
    draws = np.random.default_rng(seed).standard_normal(len(GROWING))
    return tuple(int(16_000 * factor) for factor in np.exp(deviation * draws))


def _variants(kv_tokens: int) -> list[Case]:
    falling, flat = GROWING[::-1], {n: (1000 * n,) * len(GROWING) for n in (8, 16, 32)}
    fields = {
        "lognormal": dict(lengths="lognormal"),
        "even": dict(lengths="even"),
        "flat 8k": dict(longest=flat[8]),
        "flat 16k": dict(longest=flat[16]),
        "flat 32k": dict(longest=flat[32]),
        "falling from TP 4": dict(longest=falling, start=4),
        "falling from TP 4, slow links": dict(longest=falling, start=4, all_reduce_s=0.004),
        "growing, slow links": dict(all_reduce_s=0.004),
        "rising and falling": dict(longest=GROWING[::2] + GROWING[::-2]),
        "by chance": dict(longest=_noisy(0.25, 7)),
        "periods of four short rounds and a long one from TP 2": dict(longest=flat[32], are_races=True, start=2),
        "40 requests": dict(requests_per_device=40),
        "restart of 250 s": dict(restart_s=250.0),
        "reserved devices": dict(are_devices_fixed=False, requests_per_device=200),
        "reserved devices, by chance": dict(longest=_noisy(0.25, 7), are_devices_fixed=False, requests_per_device=200),
    }
    return [Case(name=f"{name}, {kv_tokens // 1000}k", kv_tokens=kv_tokens, **of) for name, of in fields.items()]  # pyright: ignore[reportArgumentType]


DESIGN = (*FIGURE_12, *(case for one in FIGURE_12 for case in _variants(one.kv_tokens)))

SAWTOOTH = tuple(length for _ in range(5) for length in range(8_000, 28_000, 4_000))
WALK = tuple(int(n) for n in 14_000 * np.exp(np.cumsum(0.12 * np.random.default_rng(11).standard_normal(25))))
SMALL_MODEL, LARGE_MODEL = 265_000, 248_000
"""Weights of Qwen2.5-7B (56 KiB per token) and 32B (256 KiB), in tokens of KV cache."""
_HELD_OUT = (
    *(Case(name=f"growing, {kv // 1000}k", kv_tokens=kv) for kv in (45_000, 75_000, 120_000, 180_000, 350_000)),
    Case(
        name="7B/8k",
        kv_tokens=1_000_000,
        weights_kv_tokens=SMALL_MODEL,
        longest=tuple(range(2_000, 8_500, 500)),
        requests_per_device=256,
    ),
    Case(name="32B/32k from TP 2", kv_tokens=42_000, weights_kv_tokens=LARGE_MODEL, start=2),
    Case(name="64 requests, 90k", kv_tokens=90_000, requests_per_device=64),
    Case(name="150 requests, 130k", kv_tokens=130_000, requests_per_device=150),
    Case(name="falling to 4k, 130k", kv_tokens=130_000, longest=tuple(range(28_000, 3_000, -1_000)), start=8),
    Case(name="flat 12k, 90k", kv_tokens=90_000, longest=(12_000,) * 25),
    Case(name="flat 24k, 180k", kv_tokens=180_000, longest=(24_000,) * 25),
    Case(name="by chance (0.5), 90k", kv_tokens=90_000, longest=_noisy(0.5, 3)),
    Case(name="by chance (0.1), 150k", kv_tokens=150_000, longest=_noisy(0.1, 5)),
    Case(name="random walk, 120k", kv_tokens=120_000, longest=WALK),
    Case(name="sawtooth, 120k", kv_tokens=120_000, longest=SAWTOOTH),
    Case(name="8k and 32k in turns, 150k", kv_tokens=150_000, longest=(8_000, 32_000) * 12),
    Case(name="growing to 56k, 224k", kv_tokens=224_000, longest=tuple(range(8_000, 58_000, 2_000))),
    Case(name="races growing, 120k", kv_tokens=120_000, are_races=True),
    Case(name="all-reduces of 2 ms, 120k", kv_tokens=120_000, all_reduce_s=0.002),
    Case(name="restart of 60 s, 150k", kv_tokens=150_000, restart_s=60.0),
    Case(name="restart of 200 s, 90k", kv_tokens=90_000, restart_s=200.0),
    Case(
        name="steps of seconds, restart of 200 s, 60k",
        kv_tokens=60_000,
        longest=tuple(range(1_000, 5_000, 160)),
        requests_per_device=128,
        restart_s=200.0,
    ),
    Case(name="reserved devices, sawtooth, 120k", kv_tokens=120_000, longest=SAWTOOTH, are_devices_fixed=False),
    Case(
        name="reserved devices, random walk, 75k",
        kv_tokens=75_000,
        longest=WALK,
        are_devices_fixed=False,
        requests_per_device=150,
    ),
)
HELD_OUT = tuple(dataclasses.replace(case, is_held_out=True) for case in _HELD_OUT)
