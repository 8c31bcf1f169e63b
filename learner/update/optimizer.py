"""Optimizer: optax chain, schedule, decay mask, and a fused AdamW step.

`adamw_step` computes the same numbers as the optax chain of `make_optimizer`, whose state it takes and returns, in
fewer passes over memory. In the chain, the new parameter reads the old moments, which the new ones overwrite in place,
so XLA for CPU copies them first. Here it reads the new moments, and each old array is read only by the expression that
replaces it.
"""

import dataclasses
import pkgutil
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Bool, Float, Float32, Int32, UInt32

from configs.sections.model import OPTIMIZERS, OptimizerConfig
from learner.model.decoder import Params
from learner.update import diagnostics
from learner.update.diagnostics import Stats, ValueStats

Words = UInt32[Array, "2"]
"""Values that distinguish the random bits of one leaf and one step."""


def rounding_words(tree: Any, *, seed: int, step: Array, epoch: Array) -> Any:
    """Returns the words of each leaf, as a tree; deterministic in seed, step and epoch."""
    # A named generator: neither a JAX flag nor a new JAX default then changes a resumed run.
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), step), epoch)
    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten(list(jax.random.bits(key, (len(leaves), 2), jnp.uint32)))


def round_stochastically(x: Array, dtype: DTypeLike, words: Words) -> Array:
    """Rounds to one of the two nearest numbers of `dtype` with expectation x; representable numbers stay exact.

    For bfloat16, the upper half of a float32: (bits(x) + u) with its lower half cleared, u uniform in [0, 2^16) (Gupta
    et al., 2015, section 3). An array that has the dtype is returned unchanged.
    """
    if x.dtype == dtype:
        return x
    if (x.dtype, jnp.dtype(dtype)) != (jnp.float32, jnp.bfloat16):
        raise ValueError(f"stochastic rounding: expected float32 to bfloat16, got {x.dtype} to {jnp.dtype(dtype)}")
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    up = (bits + _uniform_halves(x.shape, words)) & jnp.uint32(0xFFFF0000)
    rounded = jax.lax.bitcast_convert_type(up, jnp.float32)
    # Infinities are exact already; a NaN's bits would overflow into the sign.
    return jnp.where(jnp.isfinite(x), rounded, x).astype(jnp.bfloat16)


def _uniform_halves(shape: tuple[int, ...], words: Words) -> UInt32[Array, "*shape"]:
    """Returns uniform integers in [0, 2^16), by position; positions repeat after 2^32."""
    place = jnp.zeros(shape, jnp.uint32)
    for dim, size in enumerate(shape):
        place = place * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, shape, dim)
    return _mixed(_mixed(place ^ words[0]) + words[1]) >> 16


def _mixed(x: UInt32[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    """Applies a bijection of 32 bits in which each bit depends on all (the last step of MurmurHash3)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


_NOT_DECAYED = ("norm", "bias")


def learning_rate(count: ArrayLike, config: OptimizerConfig, *, num_steps: int) -> Array:
    """Returns the learning rate of the optimizer step after `count` applied steps.

    The warm-up rises as (count + 1) / warmup_steps, so that no step has rate 0. The schedule then falls over the
    remaining steps of `num_steps` (cosine: (1 + cos(pi x)) / 2, linear: 1 - x) and would reach 0 one step after the
    last.
    """
    count = jnp.asarray(count, jnp.float32)
    warmup = jnp.minimum((count + 1) / max(config.warmup_steps, 1), 1.0)
    x = jnp.clip((count - config.warmup_steps) / max(num_steps - config.warmup_steps, 1), 0.0, 1.0)
    factors = {"constant": 1.0, "cosine": (1 + jnp.cos(jnp.pi * x)) / 2, "linear": 1 - x}
    return config.learning_rate * warmup * factors[config.schedule]


def decay_mask(params: optax.Params) -> optax.Params:
    """Returns True for parameters with weight decay, which excludes norms and biases.

    The mask is by name, since a stacked norm is a matrix ([layers, dim]).
    """

    def decays(path: jax.tree_util.KeyPath, _: object) -> bool:
        name = jax.tree_util.keystr(path).lower()
        return not any(part in name for part in _NOT_DECAYED)

    return jax.tree_util.tree_map_with_path(decays, params)


def make_optimizer(
    config: OptimizerConfig, *, num_steps: int, mesh: Mesh | None = None
) -> optax.GradientTransformation:
    """Returns the optimizer: clipping of the global norm, the transformation of `OPTIMIZERS`, and decoupled decay.

    The decay is AdamW's (Loshchilov and Hutter, 2019). The schedule counts applied steps out of `num_steps`.

    `init` returns moments in the dtypes of the config, independent of the parameters' dtype. `update` computes in
    float32: gradients, state and parameters must be float32, and the caller rounds the new state to the old one's
    dtypes. It rounds stochastically, because a second moment rounded to the nearest bfloat16 would not decay: its
    spacing is 1 / 256, above 1 - beta2.
    """
    chain = optax.chain(
        optax.clip_by_global_norm(config.max_grad_norm),
        pkgutil.resolve_name(OPTIMIZERS[config.name].transform)(config, mesh),
        optax.add_decayed_weights(config.weight_decay, decay_mask),
        optax.scale_by_learning_rate(lambda count: learning_rate(count, config, num_steps=num_steps)),
    )
    dtypes = {"mu": config.mu_dtype, "trace": config.mu_dtype, "nu": config.nu_dtype}

    def stored(path: jax.tree_util.KeyPath, x: Array) -> Array:
        field = next((key.name for key in reversed(path) if isinstance(key, jax.tree_util.GetAttrKey)), "")
        return x.astype(dtypes.get(field, x.dtype))

    def init(params: optax.Params) -> optax.OptState:
        return jax.tree_util.tree_map_with_path(stored, chain.init(wide(params)))

    return optax.GradientTransformation(init, chain.update)


def wide(tree: Any) -> Any:
    """Returns the tree with floating-point arrays in float32."""
    return jax.tree.map(lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


def scale_by_adam(config: OptimizerConfig, mesh: Mesh | None = None) -> optax.GradientTransformation:
    """Returns Adam (Kingma and Ba, 2015)."""
    del mesh
    return optax.scale_by_adam(b1=config.beta1, b2=config.beta2, eps=config.eps)


def scale_by_adafactor(config: OptimizerConfig, mesh: Mesh | None = None) -> optax.GradientTransformation:
    """Returns the factored second moment (Shazeer and Stern, 2018, algorithm 4).

    The update of each layer's, and each expert's, matrix or vector is clipped to a root mean square of 1.
    """
    del config, mesh

    def clip(path: jax.tree_util.KeyPath, x: Float[Array, "*stack own"]) -> Float[Array, "*stack own"]:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        num_stacked = 0 if "layers/" not in name else x.ndim - (1 if name.endswith(("scale", "bias")) else 2)
        rms = jnp.sqrt(jnp.mean(x * x, tuple(range(num_stacked, x.ndim)), keepdims=True))
        return x / jnp.maximum(1.0, rms)

    clipped = optax.stateless(lambda updates, _: jax.tree_util.tree_map_with_path(clip, updates))
    return optax.chain(optax.scale_by_factored_rms(), clipped)


def adamw_step(
    params: Params,
    sums: Params,
    opt_state: tuple[Any, ...],
    *,
    scale: Float32[Array, ""],
    num_steps: int,
    is_good: Bool[Array, ""],
    config: OptimizerConfig,
    words: tuple[Params, tuple[Any, ...]],
) -> tuple[Params, tuple[Any, ...], Params]:
    """Applies AdamW (Loshchilov and Hutter, 2019, algorithm 2) if `is_good`; else returns the inputs unchanged.

    g = scale sums; m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g^2;

    p = p - rate_t (m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + decay p).

    Computed in float32, independent of the arrays' dtypes; bfloat16 arrays are rounded stochastically with `words`, the
    `rounding_words` of parameters and state. `sums` are float32, `scale` is the factor from a sum to the clipped mean,
    and `opt_state` is that of `make_optimizer`'s chain for adamw. Returns parameters, state, and zeros in the shape of
    the sums.
    """
    adam, adam_words = (next(p for p in s if isinstance(p, optax.ScaleByAdamState)) for s in (opt_state, words[1]))
    schedule = next(part for part in opt_state if isinstance(part, optax.ScaleByScheduleState))
    rate = learning_rate(schedule.count, config, num_steps=num_steps)
    count = jnp.asarray(optax.safe_increment(adam.count))
    correction1, correction2 = (1 - beta ** count.astype(jnp.float32) for beta in (config.beta1, config.beta2))

    def one(p: Array, total: Array, mu: Array, nu: Array, decays: bool, *words: Words) -> tuple[Array, ...]:
        g = total * scale
        # The old value stays if the sums are not finite; a select in the same pass costs nothing.
        first = jnp.where(is_good, config.beta1 * _wide(mu) + (1 - config.beta1) * g, _wide(mu))
        second = jnp.where(is_good, config.beta2 * _wide(nu) + (1 - config.beta2) * g * g, _wide(nu))
        step = first / correction1 / (jnp.sqrt(second / correction2) + config.eps)
        if decays and config.weight_decay:
            step += config.weight_decay * _wide(p)
        exact = jnp.where(is_good, _wide(p) - rate * step, _wide(p)), first, second
        new, first, second = map(round_stochastically, exact, (p.dtype, mu.dtype, nu.dtype), words)
        # A zero that depends on the new parameter, so that the buffer of the sums is free and needs no copy.
        zero = jnp.where(count < 0, new.astype(total.dtype), 0)
        return new, first, second, zero

    trees = params, sums, adam.mu, adam.nu, decay_mask(params), words[0], adam_words.mu, adam_words.nu
    stepped = jax.tree.map(one, *trees)
    new, mu, nu, zeros = jax.tree.transpose(jax.tree.structure(params), jax.tree.structure((0,) * 4), stepped)

    def counted(part: Any) -> Any:
        if isinstance(part, optax.ScaleByAdamState):
            return optax.ScaleByAdamState(count=jnp.where(is_good, count, part.count), mu=mu, nu=nu)
        if isinstance(part, optax.ScaleByScheduleState):
            return optax.ScaleByScheduleState(count=jnp.where(is_good, optax.safe_increment(part.count), part.count))
        return part

    return new, tuple(counted(part) for part in opt_state), zeros


def clip_scale(norm: Float32[Array, ""], max_norm: float) -> Float[Array, ""]:
    """Returns the factor that limits a gradient of this norm to `max_norm` (Pascanu et al., 2013)."""
    return jnp.minimum(1.0, max_norm / norm)


def _wide(x: Array) -> Float32[Array, "..."]:
    return x.astype(jnp.float32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Accumulator:
    """Sums of the optimizer step in progress; all zero right after `apply`."""

    grads: Params
    """Gradient of the weighted loss sum, float32, shaped and sharded like the parameters."""
    denominator: Float32[Array, ""]
    """Divisor of the sums of all trained tokens, known when they are packed."""
    rejected: Float32[Array, ""]
    """Part of the divisor that belongs to tokens rejected by loss.correction; subtracted once, at `apply`."""
    loss: Float32[Array, ""]
    """Weighted sum of token losses."""
    stats: Stats | ValueStats

    def __add__(self, other: "Accumulator") -> "Accumulator":
        return Accumulator(
            grads=jax.tree.map(lambda total, g: total + g, self.grads, other.grads),
            denominator=self.denominator + other.denominator,
            rejected=self.rejected + other.rejected,
            loss=self.loss + other.loss,
            stats=diagnostics.merge(self.stats, other.stats),
        )

    @classmethod
    def zeros(cls, params: Params, stats: type[Stats] | type[ValueStats] = Stats) -> "Accumulator":
        """Returns an empty accumulator with statistics of a kind."""
        return cls(
            grads=jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params),
            denominator=jnp.float32(0),
            rejected=jnp.float32(0),
            loss=jnp.float32(0),
            stats=stats.zeros(),
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainState:
    """Whole state of the learner on the devices."""

    params: Params
    opt_state: optax.OptState
    step: Int32[Array, ""]
    """Updates made, each of rounds.epochs calls of `apply`: the version of the parameters. It also advances on a
    skipped update, so that versions stay contiguous and an update's groups belong to one step."""
    skipped_updates: Int32[Array, ""]
    """Calls of `apply` that changed nothing because the loss or the gradient was not finite."""
    accumulator: Accumulator


def init_state(
    params: Params, optimizer: optax.GradientTransformation, stats: type[Stats] | type[ValueStats] = Stats
) -> TrainState:
    """Returns the state before the first update, with statistics of a kind."""
    return TrainState(
        params=params,
        opt_state=optimizer.init(params),
        step=jnp.int32(0),
        skipped_updates=jnp.int32(0),
        accumulator=Accumulator.zeros(params, stats),
    )


Metrics = dict[str, Array]
_Stepped = tuple[Params, optax.OptState, Params]
"""Parameters, optimizer state and an empty accumulator after a step."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ApplyUpdate:
    """Division of an update's gradient sums by their denominator, and the optimizer step; see `TrainStep.apply`."""

    optimizer: optax.GradientTransformation
    config: OptimizerConfig
    epochs: int
    """Optimizer steps per update of the learner."""
    num_steps: int
    """Optimizer steps of the whole run."""
    seed: int
    """Seed of the stochastic rounding of bfloat16 parameters and moments."""
    finalize: Callable[[Any], Metrics] = diagnostics.finalize
    """Maps the accumulated statistics to metrics."""

    def __call__(self, state: TrainState, epoch: Array) -> tuple[TrainState, Metrics]:
        """Returns the state after epoch number `epoch` over a batch, and the update's metrics."""
        total = state.accumulator
        divisor = total.denominator - total.rejected
        # A product, which XLA repeats at each use; a quotient would be kept as an array as large as the parameters.
        share = 1 / divisor
        loss = total.loss / divisor
        grad_norm = optax.tree.norm(jax.tree.map(lambda g: g * share, total.grads))
        # 0 / 0 is not finite either, so sums without tokens are also skipped.
        is_good = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        step = self._adamw if self.config.name == "adamw" else self._transformed
        words = rounding_words((state.params, state.opt_state), seed=self.seed, step=state.step, epoch=epoch)
        params, opt_state, zeros = step(state, share, grad_norm, is_good, words)
        count = state.step * self.epochs + epoch - state.skipped_updates
        skipped = state.skipped_updates + jnp.where(is_good, 0, 1)
        metrics = self.finalize(total.stats) | {
            "loss": loss,
            "grad_norm": grad_norm,
            "learning_rate": learning_rate(count, self.config, num_steps=self.num_steps),
            "skipped_updates": skipped,
        }
        new_state = TrainState(
            params=params,
            opt_state=opt_state,
            step=state.step + jnp.where(epoch == self.epochs - 1, 1, 0),
            skipped_updates=skipped,
            accumulator=dataclasses.replace(Accumulator.zeros({}, type(total.stats)), grads=zeros),
        )
        return new_state, metrics

    def _adamw(self, state: TrainState, share: Array, norm: Array, is_good: Array, words: Any) -> _Stepped:
        assert isinstance(state.opt_state, tuple)
        return adamw_step(
            state.params,
            state.accumulator.grads,
            state.opt_state,
            scale=share * clip_scale(norm, self.config.max_grad_norm),
            num_steps=self.num_steps,
            is_good=is_good,
            config=self.config,
            words=words,
        )

    def _transformed(self, state: TrainState, share: Array, norm: Array, is_good: Array, words: Any) -> _Stepped:
        """Applies the step with an optax transformation, which clips the norm itself."""
        del norm
        kept = state.params, state.opt_state
        params, opt_state = old = wide(kept)
        grads = jax.tree.map(lambda g: g * share, state.accumulator.grads)
        updates, opt_state = self.optimizer.update(grads, opt_state, params)
        new = jax.tree.map(
            lambda new, old: jnp.where(is_good, new, old), (optax.apply_updates(params, updates), opt_state), old
        )
        params, opt_state = jax.tree.map(lambda x, at, word: round_stochastically(x, at.dtype, word), new, kept, words)
        return params, opt_state, Accumulator.zeros(params).grads
