"""What an update makes of its sums: the one place where the optimizer steps. Pure; `step` compiles it."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from configs.sections import OptimizerConfig
from learner.model.decoder import Params
from learner.update import diagnostics
from learner.update.adamw import adamw_step, clip_scale
from learner.update.optimizer import learning_rate, wide
from learner.update.rounding import round_stochastically, rounding_words
from learner.update.state import Accumulator, TrainState

Metrics = dict[str, Array]
_Stepped = tuple[Params, optax.OptState, Params]
"""The parameters, the optimizer's state and an empty accumulator after a step."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ApplyUpdate:
    """Divides an update's gradient sums by its denominators, once, and steps the optimizer; see `Steps.apply`."""

    optimizer: optax.GradientTransformation
    config: OptimizerConfig
    epochs: int
    """Steps of the optimizer for each of the learner's."""
    num_steps: int
    """Of the optimizer, in the whole run."""
    seed: int
    """Seed of the rounding of parameters in bfloat16."""

    def __call__(self, state: TrainState, epoch: Array) -> tuple[TrainState, Metrics]:
        """The state after pass number `epoch` over a batch, and the update's metrics."""
        total = state.accumulator
        # A product, which XLA repeats where it is used; a quotient it would keep, as large as the parameters.
        share = 1 / total.denominator
        loss = total.loss / total.denominator
        grad_norm = optax.tree.norm(jax.tree.map(lambda g: g * share, total.grads))
        # 0 / 0 is not finite either, so sums without tokens are skipped too.
        is_good = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        step = self._adamw if self.config.name == "adamw" else self._transformed
        words = rounding_words(state.params, seed=self.seed, step=state.step, epoch=epoch)
        params, opt_state, zeros = step(state, share, grad_norm, is_good, words)
        count = state.step * self.epochs + epoch - state.skipped_updates
        skipped = state.skipped_updates + jnp.where(is_good, 0, 1)
        metrics = diagnostics.finalize(total.stats) | {
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
            accumulator=dataclasses.replace(Accumulator.zeros({}), grads=zeros),
        )
        return new_state, metrics

    def _adamw(self, state: TrainState, share: Array, norm: Array, is_good: Array, words: Params) -> _Stepped:
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

    def _transformed(self, state: TrainState, share: Array, norm: Array, is_good: Array, words: Params) -> _Stepped:
        """The same by an optax transformation, which clips by itself."""
        del norm
        old = wide(state.params)
        grads = jax.tree.map(lambda g: g * share, state.accumulator.grads)
        updates, opt_state = self.optimizer.update(grads, state.opt_state, old)
        new, opt_state = jax.tree.map(
            lambda new, old: jnp.where(is_good, new, old),
            (optax.apply_updates(old, updates), opt_state),
            (old, state.opt_state),
        )
        params = jax.tree.map(lambda x, p, word: round_stochastically(x, p.dtype, word), new, state.params, words)
        return params, opt_state, Accumulator.zeros(params).grads
