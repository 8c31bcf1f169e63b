"""Effective constants of the objective, which a run prints and writes to `loss.json` at its start."""

from configs.sections import LossConfig
from configs.sections.loss_table import PROXIMAL_LOSSES
from learner.objective.losses import needs


def effective_constants(
    config: LossConfig, *, temperature: float, steps_per_proximal: int = 1
) -> dict[str, float | str | bool]:
    """Returns the constants that affect the configured objective, with defaults filled in.

    At a `steps_per_proximal` of 1 (`Config.steps_per_proximal`) a clip of pi / pi_prox has no effect.
    """
    used: dict[str, float | str | bool] = {"name": config.name, **config.constants}
    if config.name in PROXIMAL_LOSSES and steps_per_proximal == 1:
        used = {name: value for name, value in used.items() if "clip" not in name}
    used |= {f"correction_{name}": value for name, value in config.correction.effective.items()}
    if needs(config).proximal:
        used["proximal"] = config.proximal
    advantage = "" if config.is_supervised else config.advantage
    if advantage:
        used["advantage"] = advantage
    if advantage in ("grpo", "turn_grpo"):
        used["advantage_eps"] = config.advantage_eps
        used["advantage_std"] = config.advantage_std
    if advantage == "turn_grpo":
        used["turn_discount"] = config.turn_discount
    used["normalization"] = config.normalized_by
    if config.entropy_coef:
        used["entropy_coef"] = config.entropy_coef
    if needs(config).reference:
        used["kl_coef"] = config.kl_coef
        used["kl_estimator"] = config.kl_estimator
        used["reference"] = config.reference_path or "the weights the run started from"
    if config.teacher_coef:
        used |= {"teacher_coef": config.teacher_coef, "teacher_divergence": config.teacher_divergence}
        if config.compares_distributions:
            used["teacher_top_k"] = config.teacher_top_k
        used |= {field: place for field, place in (*config.teacher_folders.values(), *config.teacher_urls.values())}
    if config.overlong_tokens:
        used["overlong_buffer_tokens"] = float(config.overlong_tokens)
        used["overlong_penalty"] = config.overlong_penalty
    if config.length_penalty:
        used["length_penalty"] = config.length_penalty
    used["temperature"] = temperature
    return used
