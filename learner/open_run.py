"""Builds the leading learner process from config and run folder, and resumes it from a checkpoint if there is one."""

import dataclasses
import functools
import json
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from absl import logging

from bridge.credentials import read_token
from bridge.liveness import Liveness, end_phase, report_phase
from bridge.rollout_types import Group, Version
from configs.run_folder import RunFolder
from configs.schema import Config
from learner.checkpoint import MAX_FAILED_IN_A_ROW, Checkpoints
from learner.data.problem import Problem
from learner.data.prompt_stream import PromptStream, load_prompts
from learner.data.row_filter import Quarantine, read_gold_failures
from learner.data.tokenizer import Tokenizer, load_tokenizer
from learner.distributed.channel import SingleProcess
from learner.distributed.sharding import make_mesh
from learner.evaluation.eval_sets import ProblemSet, all_sets, bad_rows, open_own_sets, questions_of
from learner.evaluation.evaluator import Evaluator
from learner.evaluation.pinned_requests import PROBE_TOKENS, PinnedRequests, probe_problems
from learner.gradient_helper.helper_client import HelperStarter, open_helper
from learner.gradient_helper.scale_down_policy import ScaleDownPolicy
from learner.heartbeat import live_actors
from learner.learner_process import LearnerProcess
from learner.metrics.metrics_writer import MetricsWriter
from learner.metrics.sample_log import SampleLog
from learner.metrics.trackers import table
from learner.model.architecture import Architecture
from learner.model.routing_replay import routing_shape
from learner.objective.effective_constants import effective_constants
from learner.parity import LostGroupsFence, ParityFence, max_abs_dlogprob
from learner.policy_trainer import PolicyTrainer
from learner.publish.destinations import Destination
from learner.publish.open_publisher import open_publisher, published_names
from learner.publish.publisher import Publisher
from learner.publish.run_card import put_run_card
from learner.replicate import Replicator
from learner.restore import TimeoutAnchors, WeightLoader, load_base, restore, trainer_of
from learner.run import Run
from learner.run_context import RunContext, announcer, open_context
from learner.schedule.rollout_stream import RolloutStream
from learner.schedule.ticket_ledger import training_sampling
from learner.update.critic_step import CriticStep, build_critic_step
from learner.update.train_step import TrainStep, build_train_step

if TYPE_CHECKING:
    from learner.metrics.tensorboard import TensorBoardSink


def readmission_of(run: Run) -> ParityFence:
    """Builds the re-admission of fenced actors; probes run only while the published weights are the current ones."""
    sampling = training_sampling(run.config, run.tokenizer.stop_token_ids)

    def published() -> Version | None:
        announced = run.publisher.announced_version
        return announced if announced is not None and announced.step == run.step else None

    def score(group: Group) -> float:
        run.heartbeat.report_progress()
        return max_abs_dlogprob(run.score, group, run.stream.packing, run.stream.routing)

    return ParityFence(
        run.store,
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
    liveness: Liveness | None = None,
    destinations: Sequence[Destination] = (),
    lead: Replicator | None = None,
    helper: HelperStarter | None = None,
) -> Run:
    """Builds the leading learner process and resumes from a checkpoint if one exists; followers use `join_run`.

    The parent process reads `liveness`. `destinations` receive versions in addition to shared memory and the bucket.
    `lead` broadcasts commands to the followers (default: no followers). `helper` starts the gradient helper
    (helpers.num_engines).

    Raises ValueError or FileNotFoundError, with a message of one line, if the model, the prompts or the mesh is
    unusable; CheckpointError if checkpoints exist, but none is intact or compatible; ProcessLostError if another
    process did not join in time.
    """
    report_phase("reading the prompts")
    architecture = Architecture.from_hf(model_folder)
    tokenizer = load_tokenizer(
        model_folder, vocab_size=architecture.vocab_size, template=config.prompts.template_settings
    )
    problems = open_problems(config, folder, tokenizer)
    lead = lead or Replicator(SingleProcess())
    report_phase("setting up the devices")
    mesh = make_mesh(**config.mesh.axes, devices=None)
    steps = build_train_step(architecture, config, mesh, lead.hosts)
    critic = build_critic_step(architecture, config, mesh, steps)

    context = open_context(config, folder, lead, liveness or Liveness.of_this_process())
    try:
        if context.turn is not None:
            report_phase("waiting for the devices")
            context.turn.take(context.await_turn)
        restored = _restore(context, architecture, steps, critic, model_folder)
        publisher = _open_publisher(context, architecture, tokenizer, destinations)
        run = _build(context, architecture, tokenizer, problems, restored, publisher, helper)
    except BaseException:
        context.heartbeat.stop()
        raise
    parity = readmission_of(run)
    lost = LostGroupsFence(context.store, bucket=config.store.bucket, keep_out=parity.ban)
    context.wait_hooks += [parity.poll, lost.look, run.evaluations.look, run.look_at_helper]
    run.heartbeat.report_progress()
    end_phase()
    report_ready(run, context.incarnation)
    return run


@dataclasses.dataclass(frozen=True)
class OpenedProblems:
    """Training problems and evaluation sets of a run."""

    prompts: PromptStream
    held_out: list[Problem]
    sets: list[ProblemSet]


@dataclasses.dataclass(frozen=True)
class _Restored:
    checkpoints: Checkpoints
    step: int
    host_state: dict[str, Any] | None
    timeouts: TimeoutAnchors
    trainer: Callable[..., PolicyTrainer]
    """Called with `publisher`; a collective call of all learner processes."""


def _restore(
    context: RunContext,
    architecture: Architecture,
    steps: TrainStep,
    critic: CriticStep | None,
    model_folder: pathlib.Path,
) -> _Restored:
    """Restores a checkpoint or loads the initial weights, records the restore in the store, and puts the run card."""
    config, folder, store = context.config, context.folder, context.store
    checkpoints = Checkpoints(
        RunFolder(folder).checkpoints,
        keep=config.checkpoint.keep,
        max_failed_in_a_row=MAX_FAILED_IN_A_ROW,
        hosts=context.lead.hosts,
    )
    weights = WeightLoader(config, architecture)
    has_saves = any(RunFolder(folder).checkpoints.glob("[0-9]*"))
    report_phase("restoring the last checkpoint" if has_saves else "reading the model's weights")
    start_s = time.monotonic()
    base = load_base(weights, model_folder)
    step, state, of_critic, host_state = restore(checkpoints, steps, weights, folder, model_folder, base, critic)
    context.timeline.took("restore" if has_saves else "read weights", start_s, time.monotonic())
    context.timeline.instant("restored", incarnation=context.incarnation, step=step)
    store.record_restore(context.incarnation, step)
    timeouts = TimeoutAnchors(store)
    timeouts.resume(host_state)
    put_run_card(store, config, folder, model_folder, architecture, state.params, base)

    trainer = functools.partial(
        trainer_of,
        config,
        architecture,
        steps,
        state,
        weights,
        model_folder,
        checkpoints=checkpoints,
        base=base,
        critic=of_critic,
    )
    return _Restored(checkpoints, step, host_state, timeouts, trainer)


def _open_publisher(
    context: RunContext, architecture: Architecture, tokenizer: Tokenizer, destinations: Sequence[Destination]
) -> Publisher:
    config = context.config
    token = read_token() if config.publish.leaves_the_machine else None
    publisher = open_publisher(
        config,
        context.folder,
        tokenizer_hash=tokenizer.fingerprint,
        names=published_names(architecture, config),
        hosts=context.lead.hosts,
        token=token,
        destinations=destinations,
        incarnation=context.incarnation,
        base_steps=context.store.restores(),
        timeline=context.timeline,
        on_wait=context.heartbeat.check,
        announce=announcer(context.store, token),
    )
    context.wait_hooks.append(publisher.check)  # a failed publish would make the learner wait forever for samples
    return publisher


def _build(
    context: RunContext,
    architecture: Architecture,
    tokenizer: Tokenizer,
    problems: OpenedProblems,
    restored: _Restored,
    publisher: Publisher,
    helper: HelperStarter | None,
) -> Run:
    config, folder, step = context.config, context.folder, restored.step
    scale_down = ScaleDownPolicy(
        config,
        num_own_devices=0 if config.actor.colocated else jax.device_count(),
        num_helper_devices=1 if helper is None else helper.num_devices,
        heartbeats=lambda: live_actors(context.store),
    )
    metrics = MetricsWriter(
        folder,
        restored_step=step,
        incarnation=context.incarnation,
        view=open_board(config, folder, step, context.incarnation),
    )
    samples = SampleLog(RunFolder(folder).samples, config.samples, tokenizer.decode, restored_step=step)
    stream = RolloutStream(
        config,
        store=context.store,
        prompts=problems.prompts,
        sampling=training_sampling(config, tokenizer.stop_token_ids),
        timeline=context.timeline,
        incarnation=context.incarnation,
        vocab_size=architecture.vocab_size,
        routing=routing_shape(config, architecture),
        step=step,
        on_wait=context.check,
        between_batches=context.look,
        on_group=lambda group: scale_down.observe(group, is_long=stream.planner.round_is_long),
    )
    stream.resume(restored.host_state)
    evaluations = Evaluator(
        config,
        problems.sets,
        context.store,
        stop_token_ids=tokenizer.stop_token_ids,
        metrics=metrics,
        accept=stream.is_sound,
        fenced_actors=lambda: stream.fenced_actors,
        on_wait=context.check,
        kept=samples.evaluated,
    )
    return Run(
        config=config,
        folder=folder,
        architecture=architecture,
        tokenizer=tokenizer,
        held_out=problems.held_out,
        store=context.store,
        timeouts=restored.timeouts,
        stream=stream,
        trainer=restored.trainer(publisher=publisher),
        lead=context.lead,
        last_saved_step=step,
        publisher=publisher,
        checkpoints=restored.checkpoints,
        evaluations=evaluations,
        probe=PinnedRequests("probe", context.store, on_wait=context.check, fenced_actors=lambda: stream.fenced_actors),
        metrics=metrics,
        samples=samples,
        timeline=context.timeline,
        heartbeat=context.heartbeat,
        lock=context.lock,
        turn=context.turn,
        helper=None
        if helper is None
        else open_helper(config, helper, num_own_devices=jax.device_count(), timeline=context.timeline),
        scale_down=scale_down,
        finished_step=context.finished_step,
    )


def open_board(config: Config, folder: pathlib.Path, step: int, incarnation: int) -> "TensorBoardSink | None":
    """Returns the TensorBoard sink if the config asks for it; other trackers run in separate processes."""
    if "tensorboard" not in config.run.tracker_names:
        return None
    from learner.metrics.tensorboard import TensorBoardSink

    return TensorBoardSink(RunFolder(folder).tensorboard, restored_step=step, incarnation=incarnation, about=table())


def open_problems(config: Config, folder: pathlib.Path, tokenizer: Tokenizer) -> OpenedProblems:
    """Opens prompts and evaluation sets, and quarantines invalid rows."""
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
    return OpenedProblems(prompts, held_out, all_sets(config, own, held_out))


def report_ready(run: LearnerProcess, incarnation: int) -> None:
    """Writes the effective loss constants to the run folder and logs them with the run's sizes."""
    constants = effective_constants(
        run.config.loss,
        temperature=run.config.sampling.temperature,
        steps_per_proximal=run.config.steps_per_proximal,
    )
    constants["max_response_tokens"] = run.config.sampling.max_response_tokens
    constants["epochs"] = run.config.rounds.epochs
    constants["remat"] = run.trainer.steps.remat
    if run.trainer.critic is not None:
        constants |= {f"critic.{k}": v for k, v in dataclasses.asdict(run.config.critic).items() if v is not None}
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
