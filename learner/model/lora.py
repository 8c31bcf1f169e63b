"""LoRA adapters: shapes, initialization, merge, validation and PEFT export.

    layers/q_proj/lora_a   A [layers, rank, in]     uniform in +-1 / sqrt(in), as PEFT initializes it
    layers/q_proj/lora_b   B [layers, out, rank]    zero, so that the first step's model is the base

The base is a frozen tree of the model's own parameters. `bridge.param_names.combine` joins both into one tree for the
decoder; `merge` adds s B A to the matrices (Hu et al., 2021, section 4.1).
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
    """Returns the names of the adapters."""
    return AdapterNames(model=architecture.param_names, modules=config.modules)


def abstract_adapters(architecture: Architecture, config: LoraConfig, dtype: DTypeLike = jnp.float32) -> Params:
    """Returns the adapters as `jax.ShapeDtypeStruct`; an empty tree without adapters."""
    kernels = flatten(abstract_params(architecture))
    shapes: dict[str, Any] = {}
    for module in config.modules:
        *stack, num_out, num_in = kernels[f"layers/{module}/kernel"].shape
        shapes[f"layers/{module}/{A}"] = jax.ShapeDtypeStruct((*stack, config.rank, num_in), dtype)
        shapes[f"layers/{module}/{B}"] = jax.ShapeDtypeStruct((*stack, num_out, config.rank), dtype)
    return unflatten(shapes)


def init_adapters(architecture: Architecture, config: LoraConfig, key: Array, dtype: DTypeLike = jnp.float32) -> Params:
    """Returns adapters that do not change the model; jit it with `out_shardings` to create them in place on a mesh."""
    shapes = flatten(abstract_adapters(architecture, config, dtype))
    keys = jax.random.split(key, len(shapes))

    def one(path: str, shape: tuple[int, ...], key: Array) -> Array:
        if path.endswith(B):
            return jnp.zeros(shape, dtype)
        bound = shape[-1] ** -0.5
        return jax.random.uniform(key, shape, jnp.float32, -bound, bound).astype(dtype)

    return unflatten({path: one(path, x.shape, k) for (path, x), k in zip(shapes.items(), keys, strict=True)})


def merge(base: Params, adapters: Params, *, scale: float, dtype: DTypeLike) -> Params:
    """Returns the base with s B A added, in `dtype` for adapted matrices; other leaves are the base's arrays.

    The sum is in float32, one layer at a time, with the base's sharding.
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
    """Returns jitted `kernel + scale B A`, with the kernel's sharding."""

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
    """Base parameters on the devices, and their checkpoint metadata."""

    params: Params
    metadata: dict[str, Any]


def lora_metadata(config: LoraConfig, model_folder: pathlib.Path) -> dict[str, Any]:
    """Returns plain data that must match on restore, {} without adapters; raises ValueError if weights are missing."""
    if not config.is_on:
        return {}
    return {"config": dataclasses.asdict(config), "base": weights_digest(model_folder)}


def check_lora(config: LoraConfig, architecture: Architecture, *, publishes_adapters: bool) -> None:
    """Raises ValueError if the model does not support the configured adapters."""
    if not config.is_on or not architecture.num_experts:
        return
    in_mlp = [target for target in OF_MLP if f"{target}_proj" in config.modules]
    if in_mlp:
        raise ValueError(
            f"lora.targets: {','.join(in_mlp)} of a mixture of experts cannot have adapters; set lora.targets=q,k,v,o"
        )
    if publishes_adapters:
        raise ValueError(
            "publish.lora=adapter does not support a mixture of experts (vLLM wraps the experts, so that their weights "
            "cannot be verified); set publish.lora=merged"
        )


CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def save(
    folder: pathlib.Path, architecture: Architecture, config: LoraConfig, adapters: Mapping[str, Any], *, base: str
) -> None:
    """Writes a PEFT folder, complete or absent, in place of an existing one; `base` names the base model to record."""
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
    """Returns a `LoraConfig` in PEFT's format."""
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
