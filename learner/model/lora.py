"""LoRA adapters: shapes, init, merge, checks, PEFT export.

    layers/q_proj/lora_a   A [layers, rank, in]     uniform in +-1 / sqrt(in), as PEFT begins
    layers/q_proj/lora_b   B [layers, out, rank]    zero, so that the first step's model is the base

The base is a tree of the model's own parameters, frozen. `bridge.param_names.combine` puts both into one tree, which
the decoder applies; `merge` adds s B A to the matrices (Hu et al., 2021, section 4.1).
"""

import dataclasses
import functools
import json
import os
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float
from safetensors.numpy import save_file

from bridge.files import flush, weights_digest
from bridge.param_names import A, AdapterNames, B, flatten, unflatten
from configs.sections.model import OF_MLP, LoraConfig
from learner.model.architecture import Architecture
from learner.model.decoder import Params, abstract_params


def names_of(architecture: Architecture, config: LoraConfig) -> AdapterNames:
    """The adapters' names."""
    return AdapterNames(model=architecture.param_names, modules=config.modules)


def abstract_adapters(architecture: Architecture, config: LoraConfig, dtype: DTypeLike = jnp.float32) -> Params:
    """The adapters as `jax.ShapeDtypeStruct`; an empty tree where they are off."""
    kernels = flatten(abstract_params(architecture))
    shapes: dict[str, Any] = {}
    for module in config.modules:
        *stack, num_out, num_in = kernels[f"layers/{module}/kernel"].shape
        shapes[f"layers/{module}/{A}"] = jax.ShapeDtypeStruct((*stack, config.rank, num_in), dtype)
        shapes[f"layers/{module}/{B}"] = jax.ShapeDtypeStruct((*stack, num_out, config.rank), dtype)
    return unflatten(shapes)


def init_adapters(architecture: Architecture, config: LoraConfig, key: Array, dtype: DTypeLike = jnp.float32) -> Params:
    """Adapters that change nothing yet; jit it with `out_shardings` to make them in place on a mesh."""
    shapes = flatten(abstract_adapters(architecture, config, dtype))
    keys = jax.random.split(key, len(shapes))

    def one(path: str, shape: tuple[int, ...], key: Array) -> Array:
        if path.endswith(B):
            return jnp.zeros(shape, dtype)
        bound = shape[-1] ** -0.5
        return jax.random.uniform(key, shape, jnp.float32, -bound, bound).astype(dtype)

    return unflatten({path: one(path, x.shape, k) for (path, x), k in zip(shapes.items(), keys, strict=True)})


def merge(base: Params, adapters: Params, *, scale: float, dtype: DTypeLike) -> Params:
    """The base with s B A added, in `dtype` where there is an adapter; all other leaves are the base's own arrays.

    The sum is taken in float32, a layer at a time, and split over the mesh as the base is.
    """
    leaves, parts = dict(flatten(base)), flatten(adapters)
    for path_a in (path for path in parts if path.endswith(f"/{A}")):
        prefix = path_a.rpartition("/")[0]
        kernel = leaves[f"{prefix}/kernel"]
        add = _add(kernel.sharding if isinstance(kernel, jax.Array) else None)
        leaves[f"{prefix}/kernel"] = add(kernel, parts[path_a], parts[f"{prefix}/{B}"], scale, jnp.dtype(dtype))
    return unflatten(leaves)


@functools.cache
def _add(sharding: Any) -> Any:
    """Jitted `kernel + scale B A`, split as the kernel is."""

    def add(
        kernel: Float[Array, "L out in"],
        a: Float[Array, "L r in"],
        b: Float[Array, "L out r"],
        scale: float,
        dtype: jnp.dtype,
    ) -> Float[Array, "L out in"]:
        def one(of_layer: tuple[Array, Array, Array]) -> Array:
            w, a, b = (x.astype(jnp.float32) for x in of_layer)
            return (w + scale * jnp.matmul(b, a, precision=jax.lax.Precision.HIGHEST)).astype(dtype)

        return jax.lax.map(one, (kernel, a, b))

    return jax.jit(add, static_argnums=(3, 4), out_shardings=sharding)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraBase:
    """The base on the devices, and what a checkpoint says of it."""

    params: Params
    metadata: dict[str, Any]


def lora_metadata(config: LoraConfig, model_folder: pathlib.Path) -> dict[str, Any]:
    """What must be the same when adapters are restored, as plain data; empty without adapters.

    Raises:
      ValueError: the folder lacks weights.
    """
    if not config.is_on:
        return {}
    return {"config": dataclasses.asdict(config), "base": weights_digest(model_folder)}


def check_lora(config: LoraConfig, architecture: Architecture, *, publishes_adapters: bool) -> None:
    """Refuses adapters that this model can't have.

    Raises:
      ValueError: says which.
    """
    if not config.is_on or not architecture.num_experts:
        return
    in_mlp = [target for target in OF_MLP if f"{target}_proj" in config.modules]
    if in_mlp:
        raise ValueError(
            f"lora.targets: {','.join(in_mlp)} of a mixture of experts have no adapters here; take lora.targets=q,k,v,o"
        )
    if publishes_adapters:
        raise ValueError(
            "publish.lora=adapter is not served beside a mixture of experts (vLLM wraps its experts, which then can't "
            "be proved); take publish.lora=merged"
        )


CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def save(
    folder: pathlib.Path, architecture: Architecture, config: LoraConfig, adapters: Mapping[str, Any], *, base: str
) -> None:
    """Writes a folder, which is whole or absent.

    Args:
      folder: where to; one that is there is replaced.
      architecture: the base's.
      config: the adapters'.
      adapters: their tree, on the host.
      base: what is written as the base model's name or folder.
    """
    temporary = folder.with_name(f".{folder.name}.tmp-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    names, leaves = names_of(architecture, config), flatten(adapters)
    tensors: dict[str, np.ndarray] = {}
    for path in names.paths():
        tensors |= zip(names.hf_names(path), np.asarray(leaves[path]), strict=True)
    save_file(tensors, temporary / WEIGHTS, metadata={"format": "pt"})
    flush(temporary / WEIGHTS)
    text = json.dumps(adapter_config(config, base=base), indent=2, sort_keys=True) + "\n"
    (temporary / CONFIG).write_text(text, encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)


def adapter_config(config: LoraConfig, *, base: str) -> dict[str, Any]:
    """What PEFT calls a `LoraConfig`."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "use_rslora": config.rank_stabilized,
        "target_modules": list(config.modules),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
    }
