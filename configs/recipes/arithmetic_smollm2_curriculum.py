"""`arithmetic_smollm2` with a curriculum by size: numbers up to 9, 20, 50 and 99 are four sources.

The curriculum prefers sizes that are solved half the time. Run it after `arithmetic_smollm2:sft`, with
`--config=arithmetic_smollm2_curriculum` or another schedule.
"""

import dataclasses

from configs.recipes import arithmetic_smollm2
from configs.schema import Config
from configs.sections.prompts import PromptSource
from configs.tasks.arithmetic import SIZES

DATA = "data/arithmetic"


def get_config(preset: str = "pipelinerl") -> Config:
    """Returns the config of `arithmetic_smollm2_curriculum`, or of `arithmetic_smollm2_curriculum:rolloutpipe`."""
    config = arithmetic_smollm2.get_config(preset)
    sizes = {
        f"up_to_{size}": PromptSource(
            path=f"{DATA}/up_to_{size}.jsonl", eval_path=f"{DATA}/up_to_{size}_held_out.jsonl"
        )
        for size in SIZES
    }
    return dataclasses.replace(
        config,
        run=dataclasses.replace(config.run, name=f"arithmetic-smollm2-curriculum-{preset}", num_updates=32),
        prompts=dataclasses.replace(
            config.prompts, path="", eval_path="", mixture=sizes, curriculum="learnable", curriculum_groups=16
        ),
    )
