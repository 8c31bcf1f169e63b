"""Checks of everything a run needs before it starts; they load neither jax nor torch."""

import dataclasses
import json
import math
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection

from actor.environments.environment_pool import check_environments
from actor.rewards import verifier_pool
from actor.vllm.compiler import check_library, do_without_compiler
from actor.weights.model_folder import tensor_table
from bridge.files import weight_files
from bridge.param_names import adapter_table
from configs import custom_functions
from configs.race_capacity import check_race_capacity, may_be_too_narrow
from configs.run_folder import RunFolder, snapshot_folder, snapshot_root
from configs.schema import Config
from configs.sections.evaluation import HELD_OUT
from launch.startup.build_actor import check_sandbox
from launch.startup.space_needs import BYTES, checkpoint_bytes, num_params_of, shared_bytes
from launch.supervision.placement import Machine, check_gpu_memory_shares, core_ids, place
from learner.data.open_sources import held_out_of, open_sources
from learner.data.row_filter import SetAside
from learner.data.tokenizer import Tokenizer, load_tokenizer
from learner.evaluation.eval_sets import all_sets, open_own_sets, questions_of
from learner.metrics.tracker_kinds import check_installed
from learner.model.architecture import Architecture
from learner.model.check_teachers import teacher_architectures
from learner.model.lora import check_lora
from learner.model.routing_replay import routing_shape
from learner.model.value_head import check_critic

_PROBE_BYTES = 2**16
CHECK_S = 300.0
"""Timeout for importing and compiling the custom loss and advantage, in seconds."""


def check(
    config: Config,
    model_folder: pathlib.Path,
    *,
    gold_failures: SetAside | None = None,
    roles: Collection[str] = ("learner",),
    num_hosts: int | None = None,
) -> list[str]:
    """Checks the model folder, tokenizer, prompts and snapshot space; returns notes. Raises ValueError if one fails.

    `gold_failures` holds rows whose reference answers fail; `roles` and `num_hosts` are as in `check_snapshot_room`.
    """
    tokenizer = check_model(config, model_folder)
    notes = [*tokenizer.notes]
    own = open_own_sets(config, tokenizer)
    opened = open_sources(config, tokenizer, gold_failures=gold_failures, evaluated=questions_of(own))
    for looked_at in [one for o in (*own.values(), *opened) for one in o.looked_at]:
        looked_at.check_num_bad(config.prompts.max_bad_share)
        if looked_at.num_contradicting:
            notes.append(
                f"warning: {looked_at.path}: {looked_at.num_contradicting} questions have several different answers"
            )
    for source in opened:
        if not source.is_endless:
            notes.append(
                f"{source.source.path}: {len(source.problems)} problems to train on, {len(source.held_out)} held out"
            )
        if source.bad:
            first = source.bad[0]
            notes.append(
                f"warning: {len(source.bad)} invalid rows excluded (quarantine.jsonl); row {first.row}: {first.reason}"
            )
    for one in all_sets(config, own, held_out_of(opened)):
        if one.name != HELD_OUT:
            notes.append(
                f"evaluation set {one.name}: {len(one.problems)} problems, {one.config.k} samples each"
                + (f"; {len(one.bad)} invalid rows excluded: {one.bad[0].reason}" if one.bad else "")
            )
    num_held_out = sum(len(source.held_out) for source in opened)
    if num_held_out < config.evaluation.num_problems:
        notes.append(
            f"warning: evaluation.num_problems={config.evaluation.num_problems}, but only {num_held_out} are available"
        )
    check_snapshot_room(config, model_folder, roles=roles, num_hosts=num_hosts)
    return notes


def check_model(config: Config, model_folder: pathlib.Path) -> Tokenizer:
    """Checks the model folder and its content; returns the tokenizer. Raises ValueError if a check fails."""
    folders = _check_model_folders(config, model_folder)
    try:
        model = Architecture.from_hf(model_folder)
        check_critic(config, model, model_folder)
        routing_shape(config, model)
    except FileNotFoundError as e:
        raise ValueError(str(e)) from e
    check_lora(config.lora, model, publishes_adapters=config.publishes_adapters)
    for folder in folders:
        if missing := missing_weights(folder):
            raise ValueError(f"{folder}: missing weights: {missing}")
    if (asked := config.model.max_tokens) > (limit := model.max_position_embeddings):
        raise ValueError(
            f"model.max_tokens: expected at most {limit} (max_position_embeddings of the model), got {asked}"
        )
    teacher_architectures(config, model, model_folder)
    tokenizer = load_tokenizer(model_folder, vocab_size=model.vocab_size, template=config.prompts.template_settings)
    _check_template(config, tokenizer)
    return tokenizer


def _check_template(config: Config, tokenizer: Tokenizer) -> None:
    """Raises ValueError if the chat template is required but absent, is ambiguous, or rejects its arguments."""
    prompts, chat = config.prompts, tokenizer.chat
    if prompts.chat_template == "off":
        return
    if not chat.exists:
        if prompts.chat_template == "on":
            raise ValueError(f"{chat.folder} has no chat template; set prompts.chat_template=auto or off")
        if prompts.template_arguments:
            raise ValueError(f"prompts.template_arguments has no effect: {chat.folder} has no chat template; remove it")
        return
    chat.source_for(tools=False)
    chat.check_arguments(prompts.template_arguments)


def check_engines(config: Config, roles: Collection[str], machine: Machine | None = None) -> list[str]:
    """Checks the devices for the engines that this command starts; returns notes.

    Without actors in `roles`, a note gives the engines that a race needs. `machine` defaults to all devices that this
    process sees. Raises ValueError if there are too few devices, or a system library is missing.
    """
    if config.loss.is_supervised:
        return []
    size, notes = config.actor.max_num_seqs, list[str]()
    if config.environments_played and not config.actor.prefix_caching:
        notes.append(
            "warning: actor.prefix_caching=false recomputes all earlier turns of an episode in each turn; "
            "set actor.prefix_caching=true"
        )
    if "actor" not in roles:
        shortage = check_race_capacity(config, num_engines=0, max_num_seqs=size)
        return notes + ([f"note: {shortage}"] if shortage else [])
    machine = machine or Machine.here()
    placement = place(config, machine)
    if "learner" in roles:
        check_gpu_memory_shares(config, placement, machine)
    num_engines = config.actor.num_engines
    found = (
        check_race_capacity(config, num_engines=num_engines, max_num_seqs=size),
        may_be_too_narrow(config, num_engines=num_engines),
    )
    check_library()
    # Set here because actors inherit this process's environment, so the warning appears once for all of them.
    uncompiled = do_without_compiler(os.environ)
    warnings = placement.warnings(machine, is_colocated=config.actor.colocated)
    return notes + warnings + [f"warning: {what}" for what in (*found, uncompiled) if what]


def check_folders(config: Config, model_folder: pathlib.Path) -> None:
    """Checks that input folders exist and that output folders are writable, by writing a probe file.

    Raises ValueError that names folder and field, or OSError if a run that has begun cannot write to its folder.
    """
    _check_model_folders(config, model_folder)
    _check_writable(config, pathlib.Path(config.run_dir), "--config.run.dir")
    _check_writable(config, snapshot_root(config), "publish.snapshot_dir")


def check_snapshot_room(
    config: Config,
    model_folder: pathlib.Path,
    *,
    roles: Collection[str] = ("learner",),
    num_hosts: int | None = None,
) -> None:
    """Checks the space for two snapshot slots of this host's rows and one copy per local engine, in the served dtype.

    The run's existing snapshots are overwritten, so their bytes count as free. A supervised run has none. `roles` are
    those that this command starts. Without actors, engines count only if weights stay on this machine (`publish.serve`,
    `publish.bucket`). `num_hosts` are the learner's machines. None means `learner.num_processes`, or 1 with actors.
    Raises ValueError if there is too little space (OSError if the run has begun).
    """
    if config.loss.is_supervised:
        return
    num_params = _num_adapted(config, model_folder) if config.publishes_adapters else num_params_of(model_folder)
    existing = _existing(snapshot_root(config))
    free = shutil.disk_usage(existing).free + _num_snapshot_bytes(config)
    is_local = "actor" in roles
    num_hosts = num_hosts or (1 if is_local else config.learner.num_processes)
    num_engines = config.actor.num_engines if is_local or not config.publish.leaves_the_machine else 0
    num_bytes = shared_bytes(
        config,
        served_bytes=num_params * BYTES[config.model.served_dtype],
        num_params=num_params,
        num_hosts=num_hosts,
        num_engines=num_engines,
    )
    if free < num_bytes:
        whose = "two slots" if num_hosts == 1 else f"two slots of one of {num_hosts} hosts"
        raise _refusal(config)(
            f"{existing}: expected {_size(num_bytes)} free for snapshots ({whose} and one copy for each of "
            f"{num_engines} local engines), got {_size(free)}; set publish.snapshot_dir to a larger filesystem"
        )


def check_disk_space(config: Config, model_folder: pathlib.Path) -> None:
    """Checks that the disk holds the remaining checkpoints, each with parameters and optimizer moments.

    Existing checkpoints already occupy their space, at any size. Raises ValueError if there is too little space
    (OSError if the run has begun).
    """
    run, every = RunFolder(pathlib.Path(config.run_dir)), config.checkpoint.every_n_steps
    saves = list(run.checkpoints.glob("*"))
    steps = [int(f.name) for f in saves if f.name.isdigit()]
    last = max(steps, default=0)
    num_left = 1 + config.run.num_updates // every - last // every if last < config.run.num_updates else 0
    num_saves = max(0, min(config.checkpoint.keep + 1 - len(steps), num_left))
    num_params = _num_adapted(config, model_folder) if config.lora.is_on else num_params_of(model_folder)
    save_bytes = checkpoint_bytes(config, model_folder, num_params, are_adapters=config.lora.is_on)
    if config.loss.uses_critic and config.critic.backbone == "own":
        critic = pathlib.Path(config.critic.path or model_folder)
        save_bytes += checkpoint_bytes(config, critic, num_params_of(critic), are_adapters=False)
    num_bytes = num_saves * save_bytes
    existing = _existing(run.path)
    # Other folders are incomplete saves of killed processes, which new saves replace.
    free = shutil.disk_usage(existing).free + sum(_num_bytes_below(f) for f in saves if not f.name.isdigit())
    if free < num_bytes:
        raise _refusal(config)(
            f"{existing}: expected {_size(num_bytes)} free for {num_saves} more checkpoints, got {_size(free)}; free "
            "disk space, or set another --config.run.dir"
        )


def _size(num_bytes: int) -> str:
    unit, name = next(((2**p, n) for p, n in ((30, "GiB"), (20, "MiB")) if num_bytes >= 2**p), (2**10, "KiB"))
    return f"{num_bytes / unit:.1f} {name}"


def check_functions(config: Config, roles: Collection[str]) -> list[str]:
    """Tests custom functions, each in a process like the one that will call it; returns notes.

    The actor calls verifiers and environments, which are imported here, and programs in the sandbox, which is tested if
    the run needs it. The learner calls loss and advantage; its trackers must be installed. Raises ValueError if a check
    fails.
    """
    own: list[str] = []
    notes: list[str] = []
    if "learner" in roles:
        check_installed(config.run.tracker_names)
        objective = {"loss.name": config.loss.name, "loss.advantage": config.loss.advantage}
        own += [f"{field}={name}" for field, name in objective.items() if custom_functions.is_custom(name)]
        if own:
            _try_objective(config)
    if "actor" in roles:
        own += [f"prompts.verifier={name}" for name in config.custom_verifiers]
        own += [f"prompts.environment={name}" for name in config.custom_environments]
        if config.rewards.cpu_cores:
            verifier_pool.check_cores(core_ids(config.rewards.cpu_cores))
        notes += verifier_pool.check_own(config.custom_verifiers)
        check_environments(config.environments_played, config.environments)
        notes += check_sandbox(config)
    return notes + ([f"custom functions: {', '.join(own)}"] if own else [])


def _try_objective(config: Config) -> None:
    """Tests the custom loss and advantage in a CPU subprocess, because the devices belong to the learner."""
    request = {"loss": dataclasses.asdict(config.loss), "group_size": config.rounds.samples_per_group}
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "learner.objective.check_custom"],
            input=json.dumps(request),
            env=os.environ | {"PYTHONPATH": custom_functions.python_path(), "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
            timeout=CHECK_S,
            check=False,
        )
    except subprocess.TimeoutExpired as e:
        raise ValueError(
            f"loss.name={config.loss.name} and loss.advantage={config.loss.advantage} did not import and compile in "
            f"{CHECK_S:.0f} s"
        ) from e
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()] or ["no output"]
        raise ValueError(said[-1].removeprefix("error: "))


def missing_weights(folder: pathlib.Path) -> str:
    """Describes the weight files that a model folder lacks, if any. Raises ValueError for an unreadable index."""
    index = folder / "model.safetensors.index.json"
    try:
        gone = [file.name for file in weight_files(folder) if not file.is_file()]
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise ValueError(f"{index}: expected an index of safetensors files, got {e!r}") from e
    if not gone:
        return ""
    return f"{', '.join(gone)}, named in {index.name}" if index.is_file() else f"{gone[0]} or its index"


def _check_model_folders(config: Config, model_folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns the folders of the policy, the reference, the teachers and the critic."""
    others = config.loss.frozen_folders | ({"critic.path": config.critic.path} if config.critic.path else {})
    for field, folder in {"model.path": str(model_folder), **others}.items():
        if not pathlib.Path(folder).is_dir():
            raise ValueError(f"{field}: no model folder {folder!r}; download one with python -m launch.tools.get_model")
    return [model_folder, *map(pathlib.Path, others.values())]


def _refusal(config: Config) -> type[Exception]:
    """Returns the error type for a full disk: OSError for a run that has begun, because a restart may help."""
    has_begun = any(RunFolder(pathlib.Path(config.run_dir)).checkpoints.glob("*"))
    return OSError if has_begun else ValueError


def _check_writable(config: Config, folder: pathlib.Path, field: str) -> None:
    existing = _existing(folder)
    if not existing.is_dir():
        raise ValueError(f"{folder} cannot be created: {existing} is not a folder; set another {field}")
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(bytes(_PROBE_BYTES))
    except OSError as e:
        raise _refusal(config)(f"{existing} is not writable: {e.strerror}; set another {field}") from e


def _existing(folder: pathlib.Path) -> pathlib.Path:
    return next(p for p in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(p))


def _num_adapted(config: Config, model_folder: pathlib.Path) -> int:
    table = tensor_table(model_folder, dtype=config.model.served_dtype)
    adapters = adapter_table(table, modules=config.lora.modules, rank=config.lora.rank)
    return sum(math.prod(shape) for _, shape in adapters.values())


def _num_bytes_below(folder: pathlib.Path) -> int:
    return sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())


def _num_snapshot_bytes(config: Config) -> int:
    if not RunFolder(pathlib.Path(config.run_dir)).run_id_file.is_file():
        return 0
    snapshots = snapshot_folder(config)
    return sum(map(_num_bytes_below, snapshots.parent.glob(f"{snapshots.name}*")))
