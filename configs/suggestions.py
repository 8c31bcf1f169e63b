"""Suggestions in errors: config fields, values and flags that may be meant, and commands that install extras."""

import difflib
import pathlib
import shlex
import sys
from collections.abc import Collection, Sequence

PROJECT = pathlib.Path(__file__).resolve().parent.parent
"""Folder of the clone."""

_OTHER_NAMES = {
    "actor.devices": "cuda_visible_devices",
    "actor.num_engines": "dp num_replicas num_rollout_workers",
    "actor.tensor_parallel_size": "tp tensor_model_parallel_size vllm_tensor_parallel_size",
    "admission.async_ratio": "max_async_level async_generation_ratio",
    "checkpoint.every_n_steps": "save_steps save_freq save_interval",
    "evaluation.every_n_steps": "eval_steps test_freq eval_interval",
    "lora.rank": "r lora_r lora_rank",
    "lora.alpha": "lora_alpha",
    "lora.targets": "target_modules lora_target_modules",
    "loss.advantage": "adv_estimator advantage_estimator scale_rewards norm_adv_by_std_in_grpo",
    "loss.clip_high": "epsilon_high clip_ratio_high",
    "loss.clip_low": "epsilon clip_range clip_ratio cliprange clip_ratio_low",
    "loss.entropy_coef": "entropy_coeff",
    "loss.kl_coef": "beta kl_beta kl_loss_coef",
    "loss.name": "loss_type algorithm",
    "loss.normalization": "loss_agg_mode",
    "mesh.devices": "n_gpus_per_node num_gpus trainer_gpu_ids",
    "mesh.fsdp": "fsdp_size",
    "mesh.sequence": "cp context_parallel_size ulysses_sequence_parallel_size",
    "model.compute_dtype": "dtype torch_dtype bf16",
    "model.max_tokens": "max_prompt_length max_model_len max_length seq_len max_seq_len",
    "model.path": "model_name_or_path model_name model_id",
    "model.remat": "gradient_checkpointing enable_gradient_checkpointing activation_checkpointing",
    "optimizer.beta1": "adam_beta1",
    "optimizer.beta2": "adam_beta2",
    "optimizer.eps": "adam_epsilon",
    "optimizer.learning_rate": "lr actor_lr",
    "optimizer.max_grad_norm": "grad_clip clip_grad",
    "optimizer.schedule": "lr_scheduler_type lr_scheduler",
    "optimizer.warmup_steps": "num_warmup_steps warmup lr_warmup_steps warmup_ratio",
    "optimizer.weight_decay": "wd",
    "packing.rows": "ppo_micro_batch_size_per_gpu micro_batch_size micro_batch",
    "prompts.num_epochs": "total_epochs num_train_epochs",
    "prompts.path": "dataset dataset_name data train_files prompt_data",
    "prompts.eval_path": "val_files eval_dataset",
    "prompts.verifier": "reward reward_fn reward_funcs reward_function",
    "rounds.epochs": "num_iterations ppo_epochs",
    "rounds.groups_per_round": "train_batch_size rollout_batch_size",
    "rounds.groups_per_update": "batch_size ppo_mini_batch_size mini_batch_size global_batch_size"
    " per_device_train_batch_size gradient_accumulation_steps",
    "rounds.max_lag_steps": "max_off_policy_steps max_staleness",
    "rounds.samples_per_group": "n k num_generations group_size num_samples rollouts_per_example n_samples_per_prompt",
    "critic.gae_lambda": "lam",
    "critic.discount": "gamma",
    "critic.value_clip": "cliprange_value",
    "run.dir": "output_dir default_local_dir",
    "run.name": "run_name experiment_name",
    "run.num_updates": "max_steps num_steps total_training_steps num_rollout",
    "run.project": "project_name wandb_project",
    "run.seed": "random_seed",
    "run.trackers": "report_to logger wandb use_wandb",
    "sampling.max_response_tokens": "max_tokens max_new_tokens max_completion_length max_response_length"
    " rollout_max_response_len",
    "sampling.temperature": "temp",
}
"""Names of config fields in other projects (verl, TRL, prime-rl, slime), by our path."""
OTHER_NAMES = {other: ours for ours, others in _OTHER_NAMES.items() for other in others.split()}
"""Our field path by the name in other projects (without its section)."""
_FIRST_CHOICE = {name: f"sampling.{name}" for name in ("temperature", "top_p", "top_k")} | {
    "path": "model.path",
    "learning_rate": "optimizer.learning_rate",
    "name": "run.name",
    "seed": "run.seed",
    "gpu_memory_utilization": "actor.gpu_memory_utilization",
    "max_tokens": "sampling.max_response_tokens",
}
"""Field meant by a name that several sections have, given without its section."""


def nearest(word: str, names: Collection[str], *, cutoff: float = 0.8) -> list[str]:
    """Returns the names that a shortened or misspelled word may mean; empty if none is close enough.

    A name that contains the word between underscores is preferred: `grpo` means `grpo_clip`, not `gspo`. A misspelled
    word has the name's first letter: `never` does not mean `every`.
    """
    longer = [name for name in names if word.lower() in name.split("_")] if len(word) > 2 else []
    alike = [name for name in names if name[:1] == word[:1]]
    return longer or difflib.get_close_matches(word, alike, n=1, cutoff=cutoff)


def hint(word: str, names: Collection[str], *, cutoff: float = 0.8) -> str:
    """Returns "; did you mean 'NAME'?" for the nearest names, or an empty string."""
    found = nearest(word, names, cutoff=cutoff)
    return f"; did you mean {' or '.join(map(repr, found))}?" if found else ""


def field_of(name: str, fields: Collection[str]) -> str | None:
    """Returns the path of the field that a name without its section means: ours, another project's, or similar.

    `fields` are the dotted paths of all fields.
    """
    name = name.replace("-", "_").lower()
    leaves = {path.rpartition(".")[2]: path for path in fields}
    found = _FIRST_CHOICE.get(name) or leaves.get(name) or OTHER_NAMES.get(name)
    near = difflib.get_close_matches(name, [*leaves, *OTHER_NAMES], n=1, cutoff=0.85) if len(name) > 3 else []
    return found or next((leaves.get(leaf) or OTHER_NAMES[leaf] for leaf in near), None)


def unknown_field(path: str, part: str, section: Sequence[str], names: Sequence[str], fields: Collection[str]) -> str:
    """Returns a suggestion for a path that does not exist: a field of a similar name, or the section's fields.

    `part` is the first part of `path` that does not exist, after the parts of `section`, which has the fields `names`.
    """
    leaf, rest = path.rpartition(".")[2], path.split(".")[len(section) + 1 :]
    near = difflib.get_close_matches(part, names, n=1, cutoff=0.6 if len(part) < 4 else 0.7)
    here = ".".join([*section, near[0], *rest]) if near else ""
    if rest and here not in fields:
        here = (difflib.get_close_matches(here, fields, n=1, cutoff=0.8) or [""])[0] if here else ""
    is_ours = any(other.rpartition(".")[2] == leaf for other in fields)
    if leaf in OTHER_NAMES and not is_ours:
        here = OTHER_NAMES[leaf]
    elif not (here and near) or (is_ours and here.rpartition(".")[2] != leaf):
        here = field_of(leaf, fields) or here
    return f"did you mean {here!r}?" if here else f"{'.'.join(section) or 'config'} has {', '.join(names)}"


def install_command(extra: str, *, project: pathlib.Path = PROJECT) -> str:
    """Returns the shell command that installs an extra of pyproject.toml into this Python environment.

    The command names the clone, because package indexes have another project called sluice. If `project` has no
    pyproject.toml, it names FOLDER_OF_THE_CLONE.
    """
    folder = str(project) if (project / "pyproject.toml").is_file() else "FOLDER_OF_THE_CLONE"
    python = shlex.quote(sys.executable or "python")
    return f"{python} -m pip install -e {shlex.quote(f'{folder}[{extra}]')}"
