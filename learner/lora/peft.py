"""Adapters in PEFT's format: adapter_config.json and adapter_model.safetensors, which transformers and vLLM load."""

import json
import os
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any

import numpy as np

from bridge.names import flatten
from configs.sections.lora import LoraConfig
from learner.lora.adapters import names_of
from learner.model.config import Architecture
from learner.model.hf.safetensors_file import Spec, in_file_order, write

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
    specs = {name: Spec(dtype=tensors[name].dtype, shape=tensors[name].shape) for name in in_file_order(tensors)}
    write(temporary / WEIGHTS, specs, (tensors[name] for name in specs))
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
