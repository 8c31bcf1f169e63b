"""Puts a learner together for a run folder, and brings it back to where its last checkpoint left it."""

import dataclasses
import json
import pathlib
import signal
import threading
import time
from collections.abc import Sequence

import jax
import numpy as np
from absl import logging

from bridge.phases import end_phase, say_phase
from bridge.pulse import Pulse
from bridge.run_lock import RunLock
from bridge.secrets import read_token
from bridge.store.protocol import GroupStore
from bridge.timeline import Timeline
from configs.run_folder import RunFolder
from configs.schema import Config
from learner.checkpoint import Checkpoints
from learner.data.problems import Problem
from learner.data.prompts import load_prompts
from learner.data.quarantine import Quarantine, read_set_aside
from learner.data.sets import ProblemSet, all_sets, bad_rows, open_own_sets, questions_of
from learner.data.stream import PromptStream
from learner.data.tokenizer import Tokenizer, load_tokenizer
from learner.devices.mesh import make_mesh
from learner.heart import Heart
from learner.hosts.hosts import OneHost
from learner.lead import Lead
from learner.metrics import MetricsWriter, View
from learner.model.config import Architecture
from learner.objective import losses
from learner.publish.evaluations import open_evaluations
from learner.publish.opening import open_publisher, published_names
from learner.publish.outlet import Outlet
from learner.publish.pinned import Pinned
from learner.restore import Weights, load_base, restore, trainer_of
from learner.run import Run
from learner.samples.log import SampleLog
from learner.schedule.stream import Stream
from learner.schedule.ticket_books import training_sampling
from learner.store import announcer, by_samples, open_run_store, put_run_card, take_lead
from learner.timeouts import TimeoutAnchors
from learner.trackers.tracker import table
from learner.update.step import Steps, build_steps
from learner.waiting import LostGroups, Waiting, readmission_of


def open_run(
    config: Config,
    folder: pathlib.Path,
    model_folder: pathlib.Path,
    *,
    pulse: Pulse | None = None,
    outlets: Sequence[Outlet] = (),
    lead: Lead | None = None,
) -> Run:
    """Builds a learner; resumes if the folder has a checkpoint.

    Of several processes it is the first one's part, and `learner.join.join_run` the others'.

    Args:
      config: the run's.
      folder: the run's.
      model_folder: a Hugging Face folder.
      pulse: of this process, where its parent feels it.
      outlets: where versions go besides this machine's memory and the bucket.
      lead: of the learner's processes; this one alone if not given.

    Raises:
      ValueError, FileNotFoundError: the model, the prompts or the mesh are unusable (one line says why).
      CheckpointError: there are checkpoints, and none is intact or fits.
      HostLostError: another process did not come.
    """
    say_phase("reading the prompts")
    architecture = Architecture.from_hf(model_folder)
    tokenizer = load_tokenizer(
        model_folder, vocab_size=architecture.vocab_size, template=config.prompts.template_settings
    )
    prompts, held_out, sets = _open_prompts(config, folder, tokenizer)
    lead = lead or Lead(OneHost())
    say_phase("setting up the devices")
    steps = build_steps(architecture, config, make_mesh(**config.mesh.axes, devices=None), lead.hosts)

    lock = RunLock(RunFolder(folder).learner_lock, "learner")
    whole_store = open_run_store(config, folder)
    finished = whole_store.finished()  # leading takes the run up again
    incarnation = take_lead(whole_store, config, folder)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    heart = Heart(
        whole_store,
        stop,
        pulse or Pulse.of_this_process(),
        lead_s=config.store.lead_s,
        hosts=lead.hosts,
        say_alive=lead.alive,
    )
    heart.start()  # before a checkpoint is restored, which may take longer than the lead lasts
    mine = config, folder, model_folder, architecture, tokenizer, steps, prompts, held_out, sets
    parts = _Parts(*mine, lock, heart, lead, None if finished is None else finished.version.step)
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
    sets: list[ProblemSet]
    lock: RunLock
    heart: Heart
    lead: Lead
    finished_step: int | None


def _build(parts: _Parts, whole_store: GroupStore, incarnation: int, outlets: Sequence[Outlet]) -> Run:
    """Restores, and puts the rest together around what was restored."""
    config, folder, model_folder, heart = parts.config, parts.folder, parts.model_folder, parts.heart
    architecture, tokenizer, steps = parts.architecture, parts.tokenizer, parts.steps
    store = by_samples(whole_store, config)
    checkpoints = Checkpoints(
        RunFolder(folder).checkpoints,
        keep=config.checkpoint.keep,
        max_failed_in_a_row=config.checkpoint.max_failed_in_a_row,
        hosts=parts.lead.hosts,
    )
    weights = Weights(config, architecture)
    has_saves = any(RunFolder(folder).checkpoints.glob("[0-9]*"))
    say_phase("restoring the last checkpoint" if has_saves else "reading the model's weights")
    start_s = time.monotonic()
    base = load_base(weights, model_folder)
    step, state, books = restore(checkpoints, steps, weights, folder, model_folder, base)
    restored_s = time.monotonic()
    store.record_restore(incarnation, step)
    timeouts = TimeoutAnchors(store)
    timeouts.resume(books)
    put_run_card(store, config, folder, model_folder, architecture, state.params, base)

    waiting = Waiting(heart)
    timeline = Timeline(RunFolder(folder).events, "learner")
    timeline.took("restore" if has_saves else "read weights", start_s, restored_s)
    timeline.instant("restored", incarnation=incarnation, step=step)
    metrics = MetricsWriter(
        folder, restored_step=step, incarnation=incarnation, view=_board(config, folder, step, incarnation)
    )
    samples = SampleLog(RunFolder(folder).samples, config.samples, tokenizer.decode_all, restored_step=step)
    token = read_token() if config.publish.leaves_the_machine else None
    publisher = open_publisher(
        config,
        folder,
        tokenizer_hash=tokenizer.fingerprint,
        names=published_names(architecture, config),
        hosts=parts.lead.hosts,
        token=token,
        outlets=outlets,
        incarnation=incarnation,
        base_steps=store.restores(),
        timeline=timeline,
        while_waiting=heart.check,
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
    trainer = trainer_of(
        config,
        architecture,
        steps,
        state,
        weights,
        model_folder,
        publisher=publisher,
        checkpoints=checkpoints,
        base=base,
    )
    run = Run(
        config=config,
        folder=folder,
        architecture=architecture,
        tokenizer=tokenizer,
        held_out=parts.held_out,
        store=store,
        timeouts=timeouts,
        stream=stream,
        trainer=trainer,
        lead=parts.lead,
        last_saved_step=step,
        publisher=publisher,
        checkpoints=checkpoints,
        evaluations=open_evaluations(
            config,
            parts.sets,
            store,
            folder=folder,
            tokenizer=tokenizer,
            metrics=metrics,
            accept=stream.is_sound,
            fenced_actors=lambda: stream.fenced_actors,
            while_waiting=waiting.check,
            kept=samples.evaluated,
        ),
        probe=Pinned("probe", store, while_waiting=waiting.check, fenced_actors=lambda: stream.fenced_actors),
        metrics=metrics,
        samples=samples,
        timeline=timeline,
        heart=heart,
        lock=parts.lock,
        finished_step=parts.finished_step,
    )
    readmission = readmission_of(run, whole_store)
    lost = LostGroups(whole_store, bucket=config.store.bucket, keep_out=readmission.keep_out)
    waiting.looks += [readmission.look, lost.look, run.evaluations.look]
    heart.worked()
    end_phase()
    _say_ready(run, incarnation)
    return run


def _board(config: Config, folder: pathlib.Path, step: int, incarnation: int) -> View | None:
    """TensorBoard's files, where they are wanted; other trackers follow the record in processes of their own."""
    if "tensorboard" not in config.run.tracker_names:
        return None
    from learner.trackers.tensorboard import Board

    return Board(RunFolder(folder).tensorboard, restored_step=step, incarnation=incarnation, about=table())


def _open_prompts(
    config: Config, folder: pathlib.Path, tokenizer: Tokenizer
) -> tuple[PromptStream, list[Problem], list[ProblemSet]]:
    """The training prompts, the held-out problems, the evaluation sets; rows that are bad are set aside in a file."""
    set_aside = read_set_aside(RunFolder(folder).set_aside)
    quarantine = Quarantine(RunFolder(folder).quarantine)
    own = open_own_sets(config, tokenizer)
    prompts, held_out, bad = load_prompts(
        config,
        tokenizer,
        set_aside=set_aside,
        quarantine=quarantine.add,
        evaluated=questions_of(own),
        digests={f"evaluation.sets.{name}": one.digest for name, one in own.items()},
    )
    quarantine.add(*bad, *bad_rows(own.values()))
    return prompts, held_out, all_sets(config, own, held_out)


def _say_ready(run: Run, incarnation: int) -> None:
    """Keeps what the loss really uses, and logs it with the sizes of the run."""
    constants = losses.effective_constants(
        run.config.loss,
        temperature=run.config.sampling.temperature,
        steps_per_proximal=run.config.steps_per_proximal,
    )
    constants["max_response_tokens"] = run.config.sampling.max_response_tokens
    constants["epochs"] = run.config.rounds.epochs
    constants["remat"] = run.trainer.steps.remat
    RunFolder(run.folder).loss_constants.write_text(json.dumps(constants, indent=2) + "\n")
    logging.info("loss %s", " ".join(f"{name}={value}" for name, value in constants.items()))
    logging.info(
        "learner ready run=%s incarnation=%d step=%d params=%d devices=%d hosts=%d",
        run.config.run.name,
        incarnation,
        run.step,
        sum(int(np.prod(x.shape)) for x in jax.tree.leaves(run.trainer.state.params)),
        jax.device_count(),
        jax.process_count(),
    )
