"""The frozen base of a run with adapters: read from the model's folder at each start, and known by its hash."""

import dataclasses
import pathlib
from typing import Any

from bridge.weights_digest import weights_digest
from configs.sections.lora import LoraConfig
from learner.model.decoder import Params


@dataclasses.dataclass(frozen=True, kw_only=True)
class Base:
    """The base on the devices, and what a checkpoint says of it."""

    params: Params
    books: dict[str, Any]


def lora_books(config: LoraConfig, model_folder: pathlib.Path) -> dict[str, Any]:
    """What must be the same when adapters are restored, as plain data; empty without adapters.

    Raises:
      ValueError: the folder lacks weights.
    """
    if not config.is_on:
        return {}
    return {"config": dataclasses.asdict(config), "base": weights_digest(model_folder)}
