"""Presets by name, and their schedule at a custom size."""

import dataclasses
from collections.abc import Callable

from configs.presets import pipelinerl, roll_flash, rolloutpipe, rollpacker, sft, tiny, tpu
from configs.schema import Config

PRESETS = {
    "serial": rolloutpipe.serial,
    "cgp": rolloutpipe.cgp,
    "rolloutpipe": rolloutpipe.rolloutpipe,
    "rollpacker": rollpacker.rollpacker,
    "pipelinerl": pipelinerl.pipelinerl,
    "pipelinerl_ess": pipelinerl.pipelinerl_ess,
    "roll_flash": roll_flash.roll_flash,
}

NAMES: dict[str, Callable[..., Config]] = {
    **PRESETS,
    "colocated": rolloutpipe.colocated,
    "sft": sft.sft,
    "tiny": tiny.tiny,
    "tiny_calculator": tiny.tiny_calculator,
    "tiny_code": tiny.tiny_code,
    "tiny_guess": tiny.tiny_guess,
    "tpu_v5e_16": tpu.tpu_v5e_16,
    "tpu_v5p_64": tpu.tpu_v5p_64,
    "tpu_v5p_128": tpu.tpu_v5p_128,
    "tpu_v6e_256": tpu.tpu_v6e_256,
}
"""All presets by name, as --config accepts them."""


def schedule(
    preset: str, *, groups_per_round: int, samples_per_group: int, groups_per_update: int, size: str = "tiny"
) -> Config:
    """Returns a preset with other R, K and U, for responses of any length. A window keeps R groups in service.

    Other settings come from `size`. `tiny`: engine and learner share the cores of a machine. `paper`: each has its own
    devices. The penalty on overlong responses is removed, because its start depends on the response length. Raises
    ValueError if the preset does not exist.
    """
    if preset not in PRESETS:
        raise ValueError(f"no preset {preset!r}; expected one of {', '.join(PRESETS)}")
    base = PRESETS[preset](size)
    admission = base.admission
    if admission.policy == "window" and admission.sequences:
        admission = dataclasses.replace(admission, sequences=groups_per_round * samples_per_group)
    return dataclasses.replace(
        base,
        rounds=dataclasses.replace(
            base.rounds,
            groups_per_round=groups_per_round,
            samples_per_group=samples_per_group,
            groups_per_update=groups_per_update,
        ),
        admission=admission,
        loss=dataclasses.replace(base.loss, overlong_buffer_tokens=None),
    )
