"""Restore of a run: checkpoint or initial model, LoRA base, compatibility checks, and timeout anchors."""

import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Generator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from absl import logging
from jax.sharding import NamedSharding

from bridge import codec
from bridge.store.sql.learner_side import LearnerStore
from configs.schema import Config
from learner.checkpoint import Checkpoints
from learner.checkpoint_hosts import CheckpointError
from learner.distributed.sharding import make_mesh, param_shardings, param_spec, placed
from learner.model import hf_load as hf_io
from learner.model.architecture import Architecture
from learner.model.check_teachers import teacher_architectures
from learner.model.decoder import Params, abstract_params
from learner.model.lora import LoraBase, abstract_adapters, lora_metadata
from learner.policy_trainer import EpochCache, PolicyTrainer, Publishing, saved_part
from learner.update.critic_step import Critic, CriticStep
from learner.update.frozen_policies import FrozenPolicies, TeacherPolicy, freeze, loads_reference
from learner.update.loss_fn import attention_paths, frozen_loss_fn
from learner.update.optimizer import TrainState
from learner.update.train_step import TrainStep


@dataclasses.dataclass(frozen=True)
class WeightLoader:
    """Loader of Hugging Face folders onto the run's mesh."""

    config: Config
    architecture: Architecture

    def load(self, folder: pathlib.Path, dtype: str, *, source: str = "model.path") -> Params:
        """Returns a folder's parameters in `dtype`; raises ValueError, naming field `source`, if its model differs."""
        mesh = make_mesh(**self.config.mesh.axes, devices=None)
        loaded, params = hf_io.load(
            folder,
            dtype=dtype,
            sharding_fn=lambda path, shape: NamedSharding(mesh, param_spec(path, shape, mesh)),
        )
        check_same_shapes(loaded, self.architecture, folder, source=source)
        return params


def load_base(weights: WeightLoader, model_folder: pathlib.Path) -> LoraBase | None:
    """Loads the frozen base of LoRA adapters from the model folder, or returns None if all parameters are trained.

    Raises ValueError if the folder lacks weights.
    """
    config = weights.config
    if not config.lora.is_on:
        return None
    host_state, dtype = lora_metadata(config.lora, model_folder), config.base_dtype
    params = weights.load(model_folder, dtype)
    with hf_io.open_folder(model_folder) as tensors:
        stored = {tensors[name].dtype for name in weights.architecture.param_names.all_hf_names()}
    if wider := sorted(str(kept) for kept in stored if jnp.promote_types(kept, dtype) != dtype):
        logging.warning(
            "LoRA base rounded files=%s devices=%s: the exported model is merged with the rounded base; "
            "set --config.model.compute_dtype=float32 to keep it exact",
            ",".join(wider),
            dtype,
        )
    return LoraBase(params=params, metadata=host_state)


class Restored(NamedTuple):
    """State of a run at its start."""

    step: int
    state: TrainState
    critic: Critic | None
    host_state: dict[str, Any] | None
    """Host state of the checkpoint; None for initial weights."""


def restore(
    checkpoints: Checkpoints,
    steps: TrainStep,
    weights: WeightLoader,
    folder: pathlib.Path,
    model_folder: pathlib.Path,
    base: LoraBase | None,
    critic: CriticStep | None = None,
) -> Restored:
    """Returns the latest checkpoint, or the initial weights.

    With a `base` the parameters are adapters: the checkpoint's, whose base must match, or fresh ones. With `critic` its
    state is restored or begun as well. Raises CheckpointError if checkpoints exist, but none is intact or compatible.
    """

    def check(host_state: dict[str, Any]) -> None:
        _check_host_state(host_state, weights=weights, folder=folder, model_folder=model_folder, base=base)
        check_same_optimizer(host_state, weights.config.optimizer.name, folder)
        check_same_critic(host_state.get("critic"), None if critic is None else critic.metadata, folder)

    abstract = saved_part(steps.abstract_state(), None if critic is None else critic.abstract_state())
    restored = checkpoints.restore_latest(abstract, check=check)
    if restored is None:
        params = steps.init_adapters() if base else weights.load(model_folder, weights.config.model.param_dtype)
        begun = None if critic is None else _new_critic(critic, weights, model_folder)
        return Restored(0, steps.init(params), begun, None)
    step, arrays, host_state = restored
    found = None
    if critic is not None:
        found = Critic(critic, TrainState(**arrays.pop("critic"), accumulator=critic.zero_accumulator()))
    return Restored(step, TrainState(**arrays, accumulator=steps.zero_accumulator()), found, host_state)


def _new_critic(critic: CriticStep, weights: WeightLoader, model_folder: pathlib.Path) -> Critic:
    return Critic(critic, critic.init({} if critic.reads_policy else load_critic(weights, model_folder)))


def load_critic(weights: WeightLoader, model_folder: pathlib.Path) -> Params:
    """Loads the critic's initial decoder, with its output head: of critic.path, or of the run's model folder."""
    path = weights.config.critic.path
    folder = pathlib.Path(path) if path else model_folder
    loader = dataclasses.replace(weights, architecture=Architecture.from_hf(folder))
    return loader.load(folder, weights.config.model.param_dtype, source="critic.path")


def restore_params(
    checkpoints: Checkpoints,
    weights: WeightLoader,
    folder: pathlib.Path,
    model_folder: pathlib.Path,
    base: LoraBase | None,
) -> tuple[int, Params]:
    """Returns the latest checkpoint's (step, parameters), or adapters with a `base`; loads no optimizer state.

    Raises CheckpointError if no checkpoint exists, or none is intact or compatible.
    """
    config, architecture = weights.config, weights.architecture
    mesh, dtype = make_mesh(**config.mesh.axes, devices=None), config.model.param_dtype
    if base is None:
        params = abstract_params(architecture, dtype)
    else:
        params = abstract_adapters(architecture, config.lora, dtype)
    check = functools.partial(_check_host_state, weights=weights, folder=folder, model_folder=model_folder, base=base)
    abstract = {"params": placed(params, param_shardings(params, mesh))}
    restored = checkpoints.restore_latest(abstract, check=check, is_part=True)
    if restored is None:
        raise CheckpointError(f"{folder}: no intact checkpoint")
    step, arrays, _ = restored
    return step, arrays["params"]


def _check_host_state(
    host_state: dict[str, Any],
    *,
    weights: WeightLoader,
    folder: pathlib.Path,
    model_folder: pathlib.Path,
    base: LoraBase | None,
) -> None:
    """Raises CheckpointError or OtherFormatError if a checkpoint's format, model or adapters differ from the run's."""
    if host_state.get("format") != codec.FORMAT:
        raise codec.OtherFormatError.of(f"the checkpoint of {folder}", host_state.get("format", "none"))
    now, mesh = _shape_fields(weights.architecture), weights.config.mesh.axes
    check_same("model", _shape_fields(Architecture.from_hf(host_state["model"])), now, folder)
    check_same_adapters(host_state.get("lora", {}), {} if base is None else base.metadata, folder, model_folder)
    if host_state["mesh"] != mesh:
        logging.info("checkpoint resharded saved_mesh=%s mesh=%s", host_state["mesh"], mesh)


def trainer_of(
    config: Config,
    architecture: Architecture,
    steps: TrainStep,
    state: TrainState,
    weights: WeightLoader,
    model_folder: pathlib.Path,
    *,
    publisher: Publishing,
    checkpoints: Checkpoints,
    base: LoraBase | None,
    critic: Critic | None = None,
) -> PolicyTrainer:
    """Builds the trainer of the restored state; a collective call, because every process may load the reference."""
    return PolicyTrainer(
        config=config,
        architecture=architecture,
        steps=steps,
        anchors=frozen_policies(steps, weights, model_folder, params=state.params, base=base),
        kept=EpochCache(steps, epochs=config.rounds.epochs),
        state=state,
        publisher=publisher,
        checkpoints=checkpoints,
        base=base,
        critic=critic,
    )


def frozen_policies(
    steps: TrainStep, weights: WeightLoader, model_folder: pathlib.Path, *, params: Params, base: LoraBase | None
) -> FrozenPolicies:
    """Loads the reference and the teachers, if any, and freezes `params` as the proximal policy, if one is needed."""
    config = weights.config
    reference = pathlib.Path(config.loss.reference_path or model_folder)

    def load_reference() -> Params:
        if loads_reference(config):
            source = "loss.reference_path" if config.loss.reference_path else "model.path"
            freeze_loaded = jax.jit(lambda params: freeze(params, config))  # as the policy is where it computes
            return freeze_loaded(weights.load(reference, config.model.param_dtype, source=source))
        assert base is not None  # the reference is the base without its adapters
        return base.params

    return FrozenPolicies(
        steps,
        config,
        load_reference=load_reference,
        params=params,
        base=None if base is None else base.params,
        teachers=_load_teachers(weights, model_folder),
    )


def _load_teachers(weights: WeightLoader, model_folder: pathlib.Path) -> list[TeacherPolicy]:
    """Loads the teachers in the compute dtype, split over the mesh like any model."""
    config, mesh = weights.config, make_mesh(**weights.config.mesh.axes, devices=None)
    architectures = teacher_architectures(config, weights.architecture, model_folder)
    teachers: list[TeacherPolicy] = []
    for (field, folder), architecture in zip(config.loss.teacher_folders.values(), architectures, strict=True):
        try:
            attention_paths(architecture, config, mesh)
        except ValueError as e:
            raise ValueError(f"{field} {folder}: {e}") from e
        loader = dataclasses.replace(weights, architecture=architecture)
        params = loader.load(pathlib.Path(folder), config.model.compute_dtype, source=field)
        logging.info("teacher loaded field=%s folder=%s", field, folder)
        loss_fn = frozen_loss_fn(architecture, config, mesh)
        k, num_words = config.loss.teacher_top_k, weights.architecture.vocab_size
        top = functools.partial(loss_fn.top_tokens, k=k, num_words=num_words)
        teachers.append(TeacherPolicy(params, top if config.loss.compares_distributions else loss_fn.score, mesh))
    return teachers


def check_same(what: str, saved: dict[str, Any], now: dict[str, Any], folder: pathlib.Path) -> None:
    """Raises CheckpointError with the names of the fields in which a checkpoint and the run differ."""
    differing = sorted(k for k in {*saved, *now} if saved.get(k) != now.get(k))
    if differing:
        fields = "; ".join(f"{field} was {saved.get(field)!r}, is {now.get(field)!r}" for field in differing)
        raise CheckpointError(f"{folder}: the checkpoint is of another {what}: {fields}")


def check_same_optimizer(host_state: dict[str, Any], name: str, folder: pathlib.Path) -> None:
    """Raises CheckpointError if the optimizer state is of another optimizer; older checkpoints do not name theirs."""
    if (saved := host_state.get("optimizer", name)) != name:
        raise CheckpointError(
            f"{folder}: the checkpoint has the optimizer state of {saved}, but optimizer.name is {name}. Set "
            f"--config.optimizer.name={saved}, or start a new run whose model.path is an export of the checkpoint."
        )


def check_same_critic(saved: dict[str, Any] | None, now: dict[str, Any] | None, folder: pathlib.Path) -> None:
    """Raises CheckpointError if a checkpoint and the run differ in having a critic, its backbone or its architecture.

    `saved` and `now` are their `CriticStep.metadata`, None without a critic.
    """
    if saved is None or now is None:
        if (saved is None) != (now is None):
            raise CheckpointError(
                f"{folder}: the checkpoint has {'no' if saved is None else 'a'} critic, got loss.advantage "
                f"{'with' if now else 'without'} one. Restore loss.advantage, or start a new run"
            )
        return
    backbone_was, backbone = ({"backbone": one.get("backbone", "own")} for one in (saved, now))
    check_same("critic", backbone_was, backbone, folder)
    if "backbone" not in saved:
        was, is_now = (dataclasses.replace(Architecture.from_hf(one), tie_word_embeddings=True) for one in (saved, now))
        check_same("critic", _shape_fields(was), _shape_fields(is_now), folder)


def check_same_adapters(
    saved: dict[str, Any], now: dict[str, Any], folder: pathlib.Path, model_folder: pathlib.Path
) -> None:
    """Raises CheckpointError if a checkpoint's adapters or their base differ from the run's."""
    check_same("lora", saved.get("config", {}), now.get("config", {}), folder)
    if saved.get("base") != now.get("base"):
        raise CheckpointError(
            f"{folder}: the checkpoint's adapters are of another base: expected {model_folder} with weights of hash "
            f"{saved.get('base')}, got {now.get('base')}. Restore these weights, or start a new run."
        )


def check_same_shapes(loaded: Architecture, architecture: Architecture, folder: pathlib.Path, *, source: str) -> None:
    """Raises ValueError if the architecture of `folder`, set by config field `source`, differs from the run's."""
    wanted = _shape_fields(architecture)
    for name, got in _shape_fields(loaded).items():
        if got != wanted[name]:
            raise ValueError(f"{source} {folder}: {name} must be {wanted[name]!r} as in the run's model, got {got!r}")


def _shape_fields(config: Architecture) -> dict[str, Any]:
    """Returns the fields that define the computation, without the notes of config.json."""
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(config) if field.compare}


FIELD = "timeout_anchors"
"""Key of the timeout anchors in the host state: {task key: space-separated seconds per test case}; may be absent."""
TASKS_A_PAGE = 512
MAX_BYTES = 64 * 2**20
"""Limit of the anchors in a checkpoint, in bytes; 100,000 tasks of 20 test cases take a quarter of it."""
_PATIENCE_S = 5.0
"""Timeout for an unreachable store while a checkpoint is saved, in seconds."""


class TimeoutAnchors:
    """Timeout anchors of one learner: saved in each checkpoint, and restored to a store that lacks them.

    Anchors are measurements and belong to no update, so a rollback keeps the newer anchors of the store.
    """

    def __init__(self, store: LearnerStore, *, max_bytes: int = MAX_BYTES) -> None:
        self._store, self._max_bytes = store, max_bytes
        self._known: dict[str, str] = {}
        """Anchors at the last checkpoint, as text, because Python numbers would take several times the memory."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the anchors as a JSON part of a checkpoint; the last known anchors if the store is unreachable."""
        try:
            self._known = self._stored()
        except TimeoutError as e:
            logging.warning(
                "timeout anchors not read from the store, saved the previous ones num_tasks=%d: %s", len(self._known), e
            )
        return {FIELD: self._known} if self._known else {}

    def resume(self, host_state: Mapping[str, Any] | None) -> None:
        """Restores the anchors of a checkpoint that the store lacks."""
        saved: dict[str, str] = (host_state or {}).get(FIELD, {})
        if not saved:
            return
        stored = self._stored()
        lacking = iter([key for key, text in saved.items() if stored.get(key) != text])
        num_put = 0
        while page := list(itertools.islice(lacking, TASKS_A_PAGE)):
            self._store.put_anchors({key: _seconds(saved[key]) for key in page})
            num_put += len(page)
        self._known = stored | saved
        logging.info("timeout anchors restored num_tasks=%d num_written=%d", len(saved), num_put)

    def _stored(self) -> dict[str, str]:
        """Returns the store's anchors up to the limit, since any actor may write anchors."""
        found: dict[str, str] = {}
        num_bytes = 0
        for key, seconds in self._pages():
            text = " ".join(map(repr, seconds))
            num_bytes += len(key) + len(text)
            if num_bytes > self._max_bytes:
                logging.warning("timeout anchors truncated max_bytes=%d num_saved=%d", self._max_bytes, len(found))
                break
            found[key] = text
        return found

    def _pages(self) -> Generator[tuple[str, tuple[float, ...]]]:
        last = ""
        while page := self._store.all_anchors(after=last, limit=TASKS_A_PAGE, timeout_s=_PATIENCE_S):
            yield from page.items()
            last = next(reversed(page))


def _seconds(text: str) -> list[float]:
    return [float(s) for s in text.split(" ")]
