"""The two models whose weights are published: names and shapes as the learner has them, values drawn at random."""

import dataclasses
import math

import jax
import jax.numpy as jnp

from bridge.param_names import ParamNames, unflatten
from learner.model.decoder import Params


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """A decoder of the usual build, its head tied to its embedding."""

    name: str
    num_layers: int
    hidden: int
    intermediate: int
    keys: int
    """Rows of the key and value projections."""
    vocabulary: int = 65536

    @property
    def names(self) -> ParamNames:
        """Of the tensors."""
        return ParamNames(
            num_layers=self.num_layers, tie_word_embeddings=True, qkv_bias=False, o_bias=False, qk_norm=False
        )

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """By path."""
        d, f, k = self.hidden, self.intermediate, self.keys
        of_a_layer = {
            "input_norm/scale": (d,),
            "q_proj/kernel": (d, d),
            "k_proj/kernel": (k, d),
            "v_proj/kernel": (k, d),
            "o_proj/kernel": (d, d),
            "post_norm/scale": (d,),
            "gate_proj/kernel": (f, d),
            "up_proj/kernel": (f, d),
            "down_proj/kernel": (d, f),
        }
        stacked = {f"layers/{path}": (self.num_layers, *shape) for path, shape in of_a_layer.items()}
        return {"embed/embedding": (self.vocabulary, d), **stacked, "final_norm/scale": (d,)}

    @property
    def num_parameters(self) -> int:
        """All of them."""
        return sum(math.prod(shape) for shape in self.shapes.values())


SIZES = {
    "0.3B": Size(name="0.3B", num_layers=20, hidden=1024, intermediate=2816, keys=512),
    "1.2B": Size(name="1.2B", num_layers=23, hidden=2048, intermediate=5504, keys=1024),
}


def make_params(size: Size) -> Params:
    """float32, as a learner on this machine's CPU has them."""
    keys = jax.random.split(jax.random.key(0), len(size.shapes))
    leaves = {
        path: 0.02 * jax.random.normal(key, shape, jnp.float32)
        for key, (path, shape) in zip(keys, size.shapes.items(), strict=True)
    }
    return jax.block_until_ready(unflatten(leaves))
