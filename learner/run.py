"""`Run`, and how it is built from its config and folder, or resumed."""

import contextlib
import dataclasses
import json
import pathlib
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from absl import logging

from bridge.codec import FORMAT
from bridge.credentials import read_token
from bridge.files import RunLock
from bridge.liveness import Liveness, end_phase, report_phase
from bridge.param_names import flatten
from bridge.rollout_types import Group, Version
from bridge.store.protocol import GroupStore, LearnerStore
from bridge.timeline import Timeline
from configs.overrides import to_json
from configs.run_folder import RunFolder, run_id
from configs.schema import Config
from learner.checkpoint import Checkpoints
from learner.data.problem import Problem
from learner.data.prompt_stream import PromptStream, load_prompts
from learner.data.row_filter import Quarantine, read_gold_failures
from learner.data.tokenizer import Tokenizer, load_tokenizer
from learner.distributed.channel import SingleProcess
from learner.distributed.sharding import make_mesh
from learner.evaluation.eval_sets import ProblemSet, all_sets, bad_rows, open_own_sets, questions_of
from learner.evaluation.evaluator import Evaluator, open_evaluations
from learner.evaluation.pinned_requests import PROBE_TOKENS, PinnedRequests, probe_problems
from learner.heartbeat import LearnerHeartbeat
from learner.metrics.metrics_writer import MetricsWriter, View
from learner.metrics.sample_log import SampleLog
from learner.metrics.trackers import table
from learner.model.architecture import Architecture
from learner.model.decoder import Params
from learner.model.lora import LoraBase
from learner.objective import losses
from learner.parity import ParityFence, max_abs_dlogprob
from learner.policy_trainer import Command, PolicyTrainer, Save, Score
from learner.publish.destinations import Destination
from learner.publish.open_publisher import open_publisher, published_names
from learner.publish.publisher import Publisher
from learner.publish.run_card import make_run_card
from learner.replicate import Replicator
from learner.restore import TimeoutAnchors, WeightLoader, load_base, restore, trainer_of
from learner.run_context import Waiting, acquire_leadership, announcer, by_samples, open_run_store
from learner.schedule.rollout_stream import RolloutStream
from learner.schedule.ticket_ledger import training_sampling
from learner.update.train_step import TrainStep, build_train_step


@dataclasses.dataclass
class Run:
    """The parts of one learner process."""

    config: Config
    folder: pathlib.Path
    architecture: Architecture
    tokenizer: Tokenizer
    held_out: list[Problem]
    store: LearnerStore
    timeouts: TimeoutAnchors
    stream: RolloutStream
    trainer: PolicyTrainer
    lead: Replicator
    last_saved_step: int
    """Of the last checkpoint that was begun; `checkpoints.latest` is there."""
    publisher: Publisher
    checkpoints: Checkpoints
    evaluations: Evaluator
    probe: PinnedRequests
    metrics: MetricsWriter
    samples: SampleLog
    timeline: Timeline
    heartbeat: LearnerHeartbeat
    lock: RunLock
    finished_step: int | None
    """That it was finished at, if it was, before this start took it up again."""
    on_stop: Save | None = None
    """What is saved if the learner is told to stop before the next update."""

    @property
    def step(self) -> int:
        """Updates made, on the host: the version of the weights."""
        return self.stream.step

    def do(self, command: Command) -> Any:
        """Does it here and in the learner's other processes; what it returns here."""
        return self.lead.do(command, self.trainer)

    def save(self) -> None:
        """Starts a checkpoint of the run as it is between two updates; the one before is finished first."""
        self._start(self.checkpoint())

    def checkpoint(self) -> Save:
        """The run as it is between two updates; its arrays are those of the moment when it is made."""
        of_base = {} if self.trainer.base is None else {"lora": self.trainer.base.metadata}
        model = json.loads(self.architecture.hf_json)
        of_run = {"format": FORMAT, "model": model, "mesh": self.config.mesh.axes} | of_base
        books = of_run | self.stream.begin_save()
        return Save(self.step, books)

    def save_on_stop(self) -> None:
        """Makes the checkpoint that the run remembers, if it is newer than the last one; waits until it is there."""
        if self.on_stop is not None and self.on_stop.step > self.last_saved_step:
            self._start(self.on_stop)
            self.stream.acknowledge(self.checkpoints.wait())

    def _start(self, save: Save) -> None:
        self.stream.acknowledge(self.checkpoints.wait())
        self.heartbeat.report_progress()
        # Of now, not of when `save` was made: read once a checkpoint, and not once an update.
        self.do(dataclasses.replace(save, books=save.books | self.timeouts.state_dict()))
        self.last_saved_step = save.step
        self.heartbeat.report_progress()

    def close(self) -> None:
        """Lets go of everything; a save in progress is finished first. The next start publishes anew."""
        with contextlib.ExitStack() as parts:  # each of them, also when one fails
            for part in (
                self.store,
                self.timeline,
                self.metrics,
                self.samples,
                self.checkpoints,
                self.publisher,
            ):
                parts.callback(part.close)
            self.heartbeat.stop()
        self.lock.release()


def put_run_card(
    store: LearnerStore,
    config: Config,
    folder: pathlib.Path,
    model_folder: pathlib.Path,
    architecture: Architecture,
    params: Params,
    base: LoraBase | None = None,
) -> None:
    """Tells actors that share no folder with this learner what they need to know.

    `params` are the learner's; where they are adapters, `base` is what they belong to.
    """
    is_merged = base is not None and not config.publishes_adapters
    published = base.params if base is not None and is_merged else params
    card, blobs = make_run_card(
        run=run_id(folder),
        name=config.run.name,
        config=to_json(config),
        model_folder=model_folder,
        names=published_names(architecture, config),
        shapes={path: tuple(leaf.shape) for path, leaf in flatten(published).items()},
        dtype=config.model.served_dtype,
        base=base.metadata["base"] if base is not None and config.publishes_adapters else "",
    )
    store.put_run_card(card, blobs)


MAX_LOST_IN_A_ROW = 8
"""Groups of an actor that are missing in the bucket without one that is there between them."""


class LostGroupsFence:
    """Keeps out actors whose large groups never reach the bucket; their tickets go to others."""

    def __init__(self, store: LearnerStore, *, bucket: str, keep_out: Callable[[str, str], None]) -> None:
        """`keep_out` fences an actor for good, for a reason."""
        self._store, self._bucket, self._keep_out = store, bucket, keep_out

    def look(self) -> None:
        """Called while the learner waits, and between two micro-batches."""
        for actor, num in list(self._store.lost_in_a_row.items()):
            if num >= MAX_LOST_IN_A_ROW:
                del self._store.lost_in_a_row[actor]
                self._keep_out(
                    actor,
                    f"none of its last {num} large groups is in {self._bucket or 'a bucket, and the run has none'}; "
                    "give its machine and the learner's one store.bucket (s3://, gs://, a shared folder), and start it "
                    "again under another name",
                )


def readmission_of(run: Run, store: LearnerStore) -> ParityFence:
    """Probes by the published weights, scored by the learner's own as long as those are the same.

    `store` is the one that actors use: there probes are whole, also where the samples of other groups are tickets.
    """
    sampling = training_sampling(run.config, run.tokenizer.stop_token_ids)

    def published() -> Version | None:
        announced = run.publisher.announced_version
        return announced if announced is not None and announced.step == run.step else None

    def score(group: Group) -> float:
        run.heartbeat.report_progress()
        return max_abs_dlogprob(lambda batch: run.do(Score(batch)), group, run.stream.packing)

    return ParityFence(
        store,
        run.stream,
        problems=probe_problems(run.held_out),
        sampling=dataclasses.replace(sampling, max_tokens=min(sampling.max_tokens, PROBE_TOKENS)),
        published=published,
        score=score,
        bound=run.config.parity_bound,
    )


def open_run(
    config: Config,
    folder: pathlib.Path,
    model_folder: pathlib.Path,
    *,
    pulse: Liveness | None = None,
    outlets: Sequence[Destination] = (),
    lead: Replicator | None = None,
) -> Run:
    """Builds a learner; resumes if the folder has a checkpoint.

    Of several processes it is the first one's part, and `learner.follower.join_run` the others'.

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
      ProcessLostError: another process did not come.
    """
    report_phase("reading the prompts")
    architecture = Architecture.from_hf(model_folder)
    tokenizer = load_tokenizer(
        model_folder, vocab_size=architecture.vocab_size, template=config.prompts.template_settings
    )
    prompts, held_out, sets = _open_prompts(config, folder, tokenizer)
    lead = lead or Replicator(SingleProcess())
    report_phase("setting up the devices")
    steps = build_train_step(architecture, config, make_mesh(**config.mesh.axes, devices=None), lead.hosts)

    lock = RunLock(RunFolder(folder).learner_lock, "learner")
    whole_store = open_run_store(config, folder)
    finished = whole_store.finished()  # leading takes the run up again
    incarnation = acquire_leadership(whole_store, config, folder)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    heartbeat = LearnerHeartbeat(
        whole_store,
        stop,
        pulse or Liveness.of_this_process(),
        leader_lease_s=config.store.leader_lease_s,
        hosts=lead.hosts,
        say_alive=lead.keep_alive,
    )
    heartbeat.start()  # before a checkpoint is restored, which may take longer than the lead lasts
    mine = config, folder, model_folder, architecture, tokenizer, steps, prompts, held_out, sets
    parts = _Parts(*mine, lock, heartbeat, lead, None if finished is None else finished.version.step)
    try:
        return _build(parts, whole_store, incarnation, outlets)
    except BaseException:
        heartbeat.stop()
        raise


@dataclasses.dataclass(frozen=True)
class _Parts:
    """What a learner has before it restores."""

    config: Config
    folder: pathlib.Path
    model_folder: pathlib.Path
    architecture: Architecture
    tokenizer: Tokenizer
    steps: TrainStep
    prompts: PromptStream
    held_out: list[Problem]
    sets: list[ProblemSet]
    lock: RunLock
    heartbeat: LearnerHeartbeat
    lead: Replicator
    finished_step: int | None


def _build(parts: _Parts, whole_store: GroupStore, incarnation: int, outlets: Sequence[Destination]) -> Run:
    """Restores, and puts the rest together around what was restored."""
    config, folder, model_folder, heartbeat = parts.config, parts.folder, parts.model_folder, parts.heartbeat
    architecture, tokenizer, steps = parts.architecture, parts.tokenizer, parts.steps
    store = by_samples(whole_store, config)
    checkpoints = Checkpoints(
        RunFolder(folder).checkpoints,
        keep=config.checkpoint.keep,
        max_failed_in_a_row=config.checkpoint.max_failed_in_a_row,
        hosts=parts.lead.hosts,
    )
    weights = WeightLoader(config, architecture)
    has_saves = any(RunFolder(folder).checkpoints.glob("[0-9]*"))
    report_phase("restoring the last checkpoint" if has_saves else "reading the model's weights")
    start_s = time.monotonic()
    base = load_base(weights, model_folder)
    step, state, books = restore(checkpoints, steps, weights, folder, model_folder, base)
    restored_s = time.monotonic()
    store.record_restore(incarnation, step)
    timeouts = TimeoutAnchors(store)
    timeouts.resume(books)
    put_run_card(store, config, folder, model_folder, architecture, state.params, base)

    waiting = Waiting(heartbeat)
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
        on_wait=heartbeat.check,
        announce=announcer(store, token),
    )
    waiting.wait_hooks.append(publisher.check)  # nothing comes of waiting for samples by weights that don't go out
    stream = RolloutStream(
        config,
        store=store,
        prompts=parts.prompts,
        sampling=training_sampling(config, tokenizer.stop_token_ids),
        timeline=timeline,
        incarnation=incarnation,
        vocab_size=architecture.vocab_size,
        step=step,
        on_wait=waiting.check,
        between_batches=waiting.look,
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
            stop_token_ids=tokenizer.stop_token_ids,
            metrics=metrics,
            accept=stream.is_sound,
            fenced_actors=lambda: stream.fenced_actors,
            on_wait=waiting.check,
            kept=samples.evaluated,
        ),
        probe=PinnedRequests("probe", store, on_wait=waiting.check, fenced_actors=lambda: stream.fenced_actors),
        metrics=metrics,
        samples=samples,
        timeline=timeline,
        heartbeat=heartbeat,
        lock=parts.lock,
        finished_step=parts.finished_step,
    )
    readmission = readmission_of(run, whole_store)
    lost = LostGroupsFence(whole_store, bucket=config.store.bucket, keep_out=readmission.ban)
    waiting.wait_hooks += [readmission.poll, lost.look, run.evaluations.look]
    heartbeat.report_progress()
    end_phase()
    _say_ready(run, incarnation)
    return run


def _board(config: Config, folder: pathlib.Path, step: int, incarnation: int) -> View | None:
    """TensorBoard's files, where they are wanted; other trackers follow the record in processes of their own."""
    if "tensorboard" not in config.run.tracker_names:
        return None
    from learner.metrics.tensorboard import TensorBoardSink

    return TensorBoardSink(RunFolder(folder).tensorboard, restored_step=step, incarnation=incarnation, about=table())


def _open_prompts(
    config: Config, folder: pathlib.Path, tokenizer: Tokenizer
) -> tuple[PromptStream, list[Problem], list[ProblemSet]]:
    """The training prompts, the held-out problems, the evaluation sets; rows that are bad are set aside in a file."""
    gold_failures = read_gold_failures(RunFolder(folder).gold_failures)
    quarantine = Quarantine(RunFolder(folder).quarantine)
    own = open_own_sets(config, tokenizer)
    prompts, held_out, bad = load_prompts(
        config,
        tokenizer,
        gold_failures=gold_failures,
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
