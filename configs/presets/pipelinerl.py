"""Presets of PipelineRL: `pipelinerl` and `pipelinerl_ess`."""

import dataclasses

from configs.presets.sizes import PaperSize, sections
from configs.schema import Config
from configs.sections import AdmissionConfig, LossConfig, OptimizerConfig, PublishConfig, RoundsConfig

PAPER = PaperSize(
    num_updates=1024,  # section 5
    max_tokens=32768,  # "maximum sequence length of 32k", section 5
    max_response_tokens=31744,  # the remainder; 1024 prompt tokens are our choice
    optimizer=OptimizerConfig(
        learning_rate=1e-6,  # section 5
        beta2=0.999,  # section 5 says Adam; this is Kingma's
        warmup_steps=0,  # not given
    ),
    max_num_seqs=64,  # H, section 5
)
OVERLONG_TOKENS = 2048
"""Length of the soft penalty: from 30k to 32k tokens (section 5). The paper does not give its size; DAPO's is 1
(`loss.overlong_penalty`)."""


def pipelinerl(size: str = "paper") -> Config:
    """In-flight weight updates after every step, running requests and their KV cache kept (PipelineRL section 4).

    Section numbers refer to the TMLR version; `pipelinerl_ess` follows the NeurIPS version. At paper size, 48 GPUs
    generate H = 64 sequences each and 80 GPUs train (section 5). If complete groups wait for the trainer, the oldest
    are discarded (ring buffers, section 4). The paper does not give K; K = 16 divides both B and 48 H.
    """
    tiny = size == "tiny"
    return Config(
        preset="pipelinerl",
        rounds=RoundsConfig(
            groups_per_round=32 if tiny else 256,
            samples_per_group=8 if tiny else 16,
            groups_per_update=16 if tiny else 64,  # B = 1024, section 5
        ),
        # At tiny size, engine and learner share two cores: a full queue blocks the engine instead of dropping groups.
        admission=AdmissionConfig(
            policy="window", sequences=128 if tiny else 48 * 64, when_full="block" if tiny else "drop_oldest"
        ),
        publish=PublishConfig(when="every", every_n_steps=1, kv_cache="keep"),
        loss=LossConfig(
            name="truncated_is",
            advantage="mean_baseline",
            max_weight=5.0,  # section 5
            normalization="sequence_sum",
            overlong_buffer_tokens=None if tiny else OVERLONG_TOKENS,
        ),
        **sections(size, "pipelinerl", PAPER),
    )


PIPELINERL_ESS_PAPER = PaperSize(
    num_updates=1000,  # section 5
    max_tokens=8192,  # "the 8K maximum", section 5
    max_response_tokens=7168,  # the remainder; 1024 prompt tokens are our choice
    optimizer=PAPER.optimizer,  # Adam at 1e-6, section 5
    max_num_seqs=64,  # H, section 5
)
ESS_FLOOR = 0.5
"""Threshold of the effective sample size. The paper does not give it, and its run never reached it (section 5). At 0.5,
half of a batch is worth nothing."""


def pipelinerl_ess(size: str = "paper") -> Config:
    """PipelineRL in its NeurIPS version: no update with a low effective sample size (section 4, Algorithm 2).

    All else equals `pipelinerl` at the size of that version: 16 GPUs generate H = 64 sequences each and 16 GPUs train
    (section 5), without a penalty on long responses.
    """
    base = pipelinerl(size)
    by_size = sections(size, "pipelinerl_ess", PIPELINERL_ESS_PAPER)
    if size != "tiny":
        # Section 5 rewards correct responses even if they are truncated.
        by_size["prompts"] = dataclasses.replace(by_size["prompts"], truncated_responses="keep")
    return dataclasses.replace(
        base,
        preset="pipelinerl_ess",
        rounds=dataclasses.replace(base.rounds, ess_floor=ESS_FLOOR),
        admission=base.admission if size == "tiny" else dataclasses.replace(base.admission, sequences=16 * 64),
        loss=dataclasses.replace(base.loss, overlong_buffer_tokens=None),
        **by_size,
    )
