"""Rotary position embedding: frequencies, their scalings, and the rotation.

Frequencies are computed once, on the host, in float32 and in the reference implementation's order of operations: at
position 100,000 one unit in the last place of a frequency is already 0.01 radian.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int

from learner.model.families.config_fields import RopeScaling

Rotation = tuple[Array, Array]
"""(sin, cos), float32 [B, S, 1, hd / 2]."""


def frequencies(head_dim: int, theta: float, scaling: RopeScaling | None = None) -> Float32[np.ndarray, " half"]:
    """Returns radians per position of each pair of dims: theta^(-2i / hd), then scaled.

    Unscaled w is RoPE (Su et al. 2021, eq. 15). With f the factor and L the original length:

    - linear: w / f (position interpolation, Chen et al. 2023, eq. 4).
    - yarn (Peng et al. 2023, section 3.2, "NTK-by-parts"): (1 - r) w + r w / f, where r rises linearly from 0 at
      the pair that turns beta_fast times in L to 1 at the pair that turns beta_slow times.
    - llama3 (Llama 3.1's reference code): w / f if the wavelength is above L / low_freq_factor, w if it is below
      L / high_freq_factor, and between them a blend linear in L / wavelength.
    """
    plain = _plain(head_dim, theta)
    if scaling is None:
        return plain
    factor = np.float32(scaling.factor)
    if scaling.kind == "linear":
        return plain / factor
    if scaling.kind == "yarn":
        ramp = _yarn_ramp(head_dim, theta, scaling)
        return np.float32(1) / (factor / plain) * ramp + plain * (np.float32(1) - ramp)
    length, low, high = scaling.original_length, scaling.low_freq_factor, scaling.high_freq_factor
    wavelengths = np.float32(2 * math.pi) / plain
    blend = ((np.float32(length) / wavelengths - low) / (high - low)).astype(np.float32)
    blended = (1 - blend) * plain / factor + blend * plain
    stretched = np.where(wavelengths > length / low, plain / factor, blended)
    return np.where(wavelengths < length / high, plain, stretched).astype(np.float32)


def rotary_angles(
    positions: Int[Array, "B S"], head_dim: int, theta: float, scaling: RopeScaling | None = None
) -> Rotation:
    """Returns (sin, cos) of position * frequency, times the attention factor; float32 [B, S, 1, hd / 2].

    The yarn attention factor (Peng et al. 2023, eq. 15) scales queries and keys, so it is applied here.
    """
    angles = positions.astype(jnp.float32)[..., None, None] * frequencies(head_dim, theta, scaling)
    magnitude = 1.0 if scaling is None else scaling.attention_factor
    return jnp.sin(angles) * magnitude, jnp.cos(angles) * magnitude


def rotate(x: Float[Array, "B S H hd"], rotation: Rotation) -> Float[Array, "B S H hd"]:
    """Rotates the pairs (i, i + hd / 2), Hugging Face's order, in float32; keeps the dtype."""
    sin, cos = rotation
    a, b = jnp.split(x.astype(jnp.float32), 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def _plain(head_dim: int, theta: float) -> np.ndarray:
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    return np.float32(1) / np.float32(theta) ** exponents


def _yarn_ramp(head_dim: int, theta: float, scaling: RopeScaling) -> np.ndarray:
    def pair_that_turns(times: float) -> float:
        return head_dim * math.log(scaling.original_length / (times * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    high = high + 0.001 if low == high else high
    pairs = np.arange(head_dim // 2, dtype=np.float32)
    return np.clip((pairs - np.float32(low)) / np.float32(high - low), 0, 1)
