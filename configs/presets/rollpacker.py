"""Tail batching with streamed gradients: short rounds race, losers make long rounds (RollPacker section 3).

P0 = 128 prompts of R0 = 8 responses (section 6), eta = 1.25 for both (section 6.3), one update per round (U = R).
Gradients accumulate while the round runs and are applied at its end, on the learner's own devices. With
`helpers.num_engines`, best half of `actor.num_engines`, engines' devices train too before the round is over (the stream
trainer, section 4.4). Elastic engines adapt to the KV cache load (section 4.2).

The paper size is Qwen2.5-14B at 16k on 32 GPUs, the middle of the paper's three, with TP = 2 (section 6). All requests
of a race must run concurrently: 160 prompts of 10 responses need seven engines of 256 sequences (`actor.num_engines`;
the paper has 16). With fewer engines, prompts lose without having started, and the run logs a warning.
"""

import dataclasses

from configs.presets.sizes import PaperSize, sections
from configs.schema import Config
from configs.sections import AdmissionConfig, LossConfig, OptimizerConfig, PublishConfig, RoundsConfig

PAPER = PaperSize(
    num_updates=200,  # not given; Figure 9 shows the first 40
    max_tokens=17408,
    max_response_tokens=16384,  # sections 2.2 and 6; 1024 prompt tokens are our choice
    optimizer=OptimizerConfig(learning_rate=1e-6),  # not given
    max_num_seqs=256,  # not given; vLLM's default
)
# The paper uses a reference model (section 6) without giving its coefficient, so the penalty is off (loss.kl_coef).

ELASTIC = {"elastic": True, "tensor_parallel_size": 2, "max_tensor_parallel_size": 4}
"""Tensor-parallel sizes of the 14B model: initially 2 (section 6), at most 4 (Figure 12(a)). Each engine reserves
devices for the largest size."""


def rollpacker(size: str = "paper") -> Config:
    """Tail batching with streamed gradients: short rounds race, losers make long rounds (RollPacker section 3)."""
    tiny = size == "tiny"
    config = Config(
        preset="rollpacker",
        rounds=RoundsConfig(
            groups_per_round=16 if tiny else 128,
            samples_per_group=8,
            groups_per_update=16 if tiny else 128,
            overprovision_prompts=1.25,
            overprovision_samples=1.25,
        ),
        admission=AdmissionConfig(policy="fifo"),
        publish=PublishConfig(when="round_end"),
        loss=LossConfig(name="grpo_clip", advantage="grpo", normalization="sequence"),
        **sections(size, "rollpacker", PAPER),
    )
    return config if tiny else dataclasses.replace(config, actor=dataclasses.replace(config.actor, **ELASTIC))
