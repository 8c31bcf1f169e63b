"""Puts a learner together for a run folder, and brings it back to where its last checkpoint left it."""

import dataclasses
import json
import pathlib
import signal
import threading
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from absl import logging
from jax.sharding import NamedSharding

from bridge.pulse import Pulse
from bridge.run_lock import RunLock
from bridge.secrets import Token, read_token
from bridge.snapshots.writer import SnapshotWriter
from bridge.store.protocol import GroupStore
from bridge.timeline import Timeline
from configs.run_folder import RunFolder, run_id, snapshot_folder
from configs.schema import Config
from learner.checkpoint import CheckpointError, Checkpoints
from learner.data.problems import Problem, write_quarantine
from learner.data.prompts import PromptStream, load_prompts
from learner.data.tokenizer import Tokenizer, load_tokenizer
from learner.devices.mesh import make_mesh, param_spec
from learner.heart import Heart
from learner.metrics import MetricsWriter
from learner.model.config import Architecture
from learner.model.decoder import Params
from learner.model.hf import io as hf_io
from learner.objective import losses
from learner.publish.outlet import Outlet
from learner.publish.outlets import outlets_of
from learner.publish.pinned import Pinned
from learner.publish.publisher import Publisher
from learner.run import Run, saved_part
from learner.schedule.stream import Stream
from learner.schedule.ticket_books import training_sampling
from learner.store import announcer, by_samples, open_run_store, put_run_card, take_lead
from learner.update.anchors import Anchors
from learner.update.kept_batch import KeptBatch
from learner.update.state import TrainState
from learner.update.step import Steps, build_steps
from learner.waiting import Waiting, readmission_of


def open_run(
    config: Config,
    folder: pathlib.Path,
    model_folder: pathlib.Path,
    *,
    steps: Steps | None = None,
    pulse: Pulse | None = None,
    outlets: Sequence[Outlet] = (),
) -> Run:
    """Builds a learner; resumes if the folder has a checkpoint.

    Args:
      config: the run's.
      folder: the run's.
      model_folder: a Hugging Face folder.
      steps: an earlier run's device functions, compiled already; built here if not given.
      pulse: of this process, where its parent feels it.
      outlets: where versions go besides this machine's memory and the bucket.

    Raises:
      ValueError, FileNotFoundError: the model, the prompts or the mesh are unusable (one line says why).
      CheckpointError: there are checkpoints, and none is intact or fits.
    """
    architecture = Architecture.from_hf(model_folder)
    tokenizer = load_tokenizer(model_folder, vocab_size=architecture.vocab_size)
    prompts, held_out = _open_prompts(config, folder, tokenizer)
    if steps is None:
        steps = build_steps(architecture, config, make_mesh(**config.mesh.axes, devices=None))
    elif not steps.fits(architecture, config):
        raise ValueError("the steps given were built for another model or configuration; let open_run build them")

    lock = RunLock(RunFolder(folder).learner_lock, "learner")
    whole_store = open_run_store(config, folder)
    incarnation = take_lead(whole_store, config, folder)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    heart = Heart(whole_store, stop, pulse or Pulse.of_this_process(), lead_s=config.store.lead_s)
    heart.start()  # before a checkpoint is restored, which may take longer than the lead lasts
    parts = _Parts(config, folder, model_folder, architecture, tokenizer, steps, prompts, held_out, lock, heart)
    try:
        return _build(parts, whole_store, incarnation, outlets)
    except BaseException:
        heart.stop()
        raise


@dataclasses.dataclass(frozen=True)
class _Parts:
    """What a learner has before it restores."""

    config: Config
    folder: pathlib.Path
    model_folder: pathlib.Path
    architecture: Architecture
    tokenizer: Tokenizer
    steps: Steps
    prompts: PromptStream
    held_out: list[Problem]
    lock: RunLock
    heart: Heart


def _build(parts: _Parts, whole_store: GroupStore, incarnation: int, outlets: Sequence[Outlet]) -> Run:
    """Restores, and puts the rest together around what was restored."""
    config, folder, model_folder, heart = parts.config, parts.folder, parts.model_folder, parts.heart
    architecture, tokenizer, steps = parts.architecture, parts.tokenizer, parts.steps
    store = by_samples(whole_store, config)
    checkpoints = Checkpoints(RunFolder(folder).checkpoints, keep=config.checkpoint.keep)
    weights = _Weights(config, architecture)
    step, state, books = _restore(checkpoints, steps, weights, folder, model_folder)
    store.record_restore(incarnation, step)
    put_run_card(store, config, folder, model_folder, architecture, state.params)

    waiting = Waiting(heart)
    timeline = Timeline(RunFolder(folder).events, "learner")
    metrics = MetricsWriter(folder, restored_step=step, incarnation=incarnation)
    token = read_token() if config.publish.leaves_the_machine else None
    publisher = Publisher(
        _writer(config, folder, tokenizer, token),
        architecture.param_names,
        config.publish,
        incarnation=incarnation,
        dtype=config.model.served_dtype,
        timeline=timeline,
        while_waiting=heart.check,
        outlets=[*outlets, *outlets_of(config.publish, snapshot_folder(config), run=run_id(folder))],
        announce=announcer(store, token),
    )
    waiting.looks.append(publisher.check)  # nothing comes of waiting for samples by weights that don't go out
    stream = Stream(
        config,
        store=store,
        prompts=parts.prompts,
        sampling=training_sampling(config, tokenizer.stop_token_ids),
        timeline=timeline,
        incarnation=incarnation,
        vocab_size=architecture.vocab_size,
        step=step,
        while_waiting=waiting.check,
        meanwhile=waiting.look,
    )
    stream.resume(books)
    reference = pathlib.Path(config.loss.reference_path or model_folder)
    run = Run(
        config=config,
        folder=folder,
        architecture=architecture,
        tokenizer=tokenizer,
        held_out=parts.held_out,
        store=store,
        stream=stream,
        steps=steps,
        anchors=Anchors(
            steps,
            config,
            load_reference=lambda: weights.load(reference, config.model.compute_dtype),
            params=state.params,
        ),
        kept=KeptBatch(steps, epochs=config.rounds.epochs),
        state=state,
        last_saved_step=step,
        last_evaluated_step=metrics.last_step("eval"),
        publisher=publisher,
        checkpoints=checkpoints,
        evaluation=Pinned(
            "eval",
            store,
            while_waiting=waiting.check,
            is_exact=config.publish.when == "round_end",
            fenced_actors=lambda: stream.fenced_actors,
        ),
        probe=Pinned("probe", store, while_waiting=waiting.check, fenced_actors=lambda: stream.fenced_actors),
        metrics=metrics,
        timeline=timeline,
        heart=heart,
        lock=parts.lock,
    )
    waiting.looks.append(readmission_of(run, whole_store).look)
    heart.worked()
    _say_ready(run, incarnation)
    return run


def _open_prompts(config: Config, folder: pathlib.Path, tokenizer: Tokenizer) -> tuple[PromptStream, list[Problem]]:
    """The training prompts and the held-out problems; rows that are neither are set aside in a file."""
    prompts, held_out, bad_rows = load_prompts(config, tokenizer)
    quarantine = RunFolder(folder).quarantine
    if bad_rows and not quarantine.exists():
        write_quarantine(quarantine, config.prompts.path, bad_rows)
    if bad_rows:
        logging.warning("rows set aside count=%d see=%s", len(bad_rows), quarantine)
    return prompts, held_out


def _writer(config: Config, folder: pathlib.Path, tokenizer: Tokenizer, token: Token | None) -> SnapshotWriter:
    publish = config.publish
    return SnapshotWriter(
        snapshot_folder(config),
        run=run_id(folder),
        tokenizer_hash=tokenizer.fingerprint,
        lock_timeout_s=config.supervision.lock_wait_s,
        token=token,
        full_every=publish.full_every if publish.leaves_the_machine else 1,
    )


@dataclasses.dataclass(frozen=True)
class _Weights:
    """Reads Hugging Face folders of the run's model, split over its mesh."""

    config: Config
    architecture: Architecture

    def load(self, folder: pathlib.Path, dtype: str) -> Params:
        """A folder's parameters in `dtype`.

        Raises:
          ValueError: it is another model.
        """
        mesh = make_mesh(**self.config.mesh.axes, devices=None)
        loaded, params = hf_io.load(
            folder,
            dtype=dtype,
            sharding_fn=lambda path, shape: NamedSharding(mesh, param_spec(path, shape, mesh)),
        )
        check_same_shapes(loaded, self.architecture, folder)
        return params


def _restore(
    checkpoints: Checkpoints, steps: Steps, weights: _Weights, folder: pathlib.Path, model_folder: pathlib.Path
) -> tuple[int, TrainState, dict[str, Any] | None]:
    """The latest checkpoint as (step, state, books), or the model's own weights at step 0 and no books.

    Raises:
      CheckpointError: there are checkpoints, and none is intact or fits.
    """
    config, architecture = weights.config, weights.architecture

    def check(books: dict[str, Any]) -> None:
        check_same("model", _shape_fields(Architecture.from_hf(books["model"])), _shape_fields(architecture), folder)
        check_same("mesh", books["mesh"], config.mesh.axes, folder)

    restored = checkpoints.restore_latest(saved_part(steps.abstract_state()), check=check)
    if restored is None:
        return 0, steps.init(weights.load(model_folder, config.model.param_dtype)), None
    step, arrays, books = restored
    return step, TrainState(**arrays, accumulator=steps.zero_accumulator()), books


def _say_ready(run: Run, incarnation: int) -> None:
    """Keeps what the loss really uses, and logs it with the sizes of the run."""
    constants = losses.effective_constants(
        run.config.loss,
        temperature=run.config.sampling.temperature,
        steps_per_proximal=run.config.steps_per_proximal,
    )
    constants["max_response_tokens"] = run.config.sampling.max_response_tokens
    constants["epochs"] = run.config.rounds.epochs
    RunFolder(run.folder).loss_constants.write_text(json.dumps(constants, indent=2) + "\n")
    logging.info("loss %s", " ".join(f"{name}={value}" for name, value in constants.items()))
    logging.info(
        "learner ready run=%s incarnation=%d step=%d params=%d devices=%d",
        run.config.run.name,
        incarnation,
        run.step,
        sum(int(np.prod(x.shape)) for x in jax.tree.leaves(run.state.params)),
        jax.device_count(),
    )


def check_same(what: str, saved: dict[str, Any], now: dict[str, Any], folder: pathlib.Path) -> None:
    """Compares what a checkpoint was made for with what is to go on from it.

    Raises:
      CheckpointError: they differ; names the fields.
    """
    differing = sorted(k for k in {*saved, *now} if saved.get(k) != now.get(k))
    if differing:
        fields = "; ".join(f"{field} was {saved.get(field)!r}, is {now.get(field)!r}" for field in differing)
        raise CheckpointError(f"the checkpoint of {folder} is of another {what}: {fields}")


def check_same_shapes(loaded: Architecture, architecture: Architecture, folder: pathlib.Path) -> None:
    """A reference may be another checkpoint of the model, not another model.

    Raises:
      ValueError: its shape differs; names the field.
    """
    wanted = _shape_fields(architecture)
    for name, got in _shape_fields(loaded).items():
        if got != wanted[name]:
            raise ValueError(f"loss.reference_path {folder}: {name} is {got!r}, the model's is {wanted[name]!r}")


def _shape_fields(config: Architecture) -> dict[str, Any]:
    """What makes two models compute alike: not the notes in a config.json."""
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(config) if field.compare}
