"""Rollout and training decoupled, bounded by the async ratio (ROLL Flash sections 4.3 and 5.1).

alpha = 2, as recommended: a sample that started more than two updates ago is aborted and regenerated. Each update is
published; running requests are aborted and resume under the new weights. Each sample is its own ticket (queue
scheduling, prompt replication). The loss is decoupled PPO (section 2.2).

The paper does not give the optimizer steps per batch. With one step, decoupled PPO equals truncated importance
sampling. Two epochs are the minimum that distinguishes them. The proximal policy is the policy before the first epoch.
"""

from configs.presets.sizes import PaperSize, sections
from configs.schema import Config
from configs.sections import AdmissionConfig, LossConfig, OptimizerConfig, PublishConfig, RoundsConfig

# The paper trains Qwen3-8B-Base and -Think on DAPO-MATH-18K and gives only alpha. Other values follow the published
# system's examples of asynchronous training.
PAPER = PaperSize(
    num_updates=1024,
    max_tokens=8192,
    max_response_tokens=7168,  # 1024 prompt tokens are our choice
    optimizer=OptimizerConfig(learning_rate=1e-6, warmup_steps=10, beta2=0.999),
)


def roll_flash(size: str = "paper") -> Config:
    """Rollout and training decoupled, bounded by the async ratio (ROLL Flash sections 4.3 and 5.1)."""
    tiny = size == "tiny"
    return Config(
        preset="roll_flash",
        rounds=RoundsConfig(
            groups_per_round=32 if tiny else 256,
            samples_per_group=8 if tiny else 16,
            groups_per_update=16 if tiny else 256,  # our choice
            epochs=2,
        ),
        admission=AdmissionConfig(policy="window", async_ratio=2.0, unit="sample"),
        publish=PublishConfig(when="every", every_n_steps=1, at_publish="abort_and_resume"),
        loss=LossConfig(name="decoupled_ppo", proximal="batch", advantage="grpo", normalization="sequence"),
        **sections(size, "roll_flash", PAPER),
    )
