"""Bytes that a run needs on one machine: shared memory for weights, and disk space of a checkpoint.

Each of the learner's n hosts holds only its own rows, 1/n of a version (`learner.publish.weight_export`). Actors on
other machines use no memory at the learner.
"""

import json
import math
import pathlib

from configs.schema import Config
from learner.model.architecture import Architecture

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a number by dtype."""
_SLOTS = 2
"""Snapshot slots: one announced, one being written."""
_DELTA_SHARE = 0.5
"""Maximum size of a slot's delta as a share of its file (`bridge.snapshots.delta`)."""
_SHARED_COPIES = 2
"""Files that the actors of a machine without the learner download into, alternately."""


def shared_bytes(
    config: Config,
    *,
    served_bytes: float,
    num_params: float,
    num_hosts: int = 1,
    num_engines: int = 0,
    is_maximum: bool = False,
) -> int:
    """Returns the bytes of a run's versions in one machine's shared memory: the minimum for publishing, or the maximum.

    The maximum adds a spare slot for slow readers and a delta per slot. `served_bytes` is a whole version in the served
    dtype. `num_engines` counts this machine's engines whose actors read the learner's memory: each mirrors a version.
    """
    slots, per_slot = _SLOTS, 1.0
    if is_maximum:
        slots += config.publish.has_spare_slot
        per_slot += _DELTA_SHARE * (config.publish.leaves_the_machine and config.publish.full_every > 1)
    # A gradient helper has a copy of a version, and hands over sums in float32.
    helper_bytes = served_bytes + 4 * num_params if config.helpers.num_engines else 0.0
    return math.ceil(slots * per_slot * served_bytes / num_hosts + num_engines * served_bytes + helper_bytes)


def actor_bytes(served_bytes: float) -> int:
    """Returns the bytes used in total by the actors of a machine without the learner."""
    return math.ceil(_SHARED_COPIES * served_bytes)


def checkpoint_bytes(config: Config, model_folder: pathlib.Path, num_params: int, *, are_adapters: bool) -> int:
    """Returns the bytes of one checkpoint of the trained parameters; norms, biases and routers count as matrices."""
    model = Architecture.from_hf(model_folder)
    embeddings = 0 if are_adapters else model.vocab_size * model.hidden_size * (2 - model.tie_word_embeddings)
    num_other = min(embeddings, num_params)
    moments = config.optimizer.state_bytes(num_matrix=num_params - num_other, num_other=num_other)
    return num_params * BYTES[config.model.param_dtype] + moments


def num_params_of(model_folder: pathlib.Path) -> int:
    """Returns the number of parameters in a model folder, from the size of its weight files and their dtype.

    An unknown dtype counts 2 bytes per parameter; none is float32.
    """
    config = json.loads((model_folder / "config.json").read_text())
    num_bytes = sum(f.stat().st_size for f in model_folder.glob("*.safetensors"))
    return num_bytes // BYTES.get(config.get("dtype") or config.get("torch_dtype") or "float32", 2)
