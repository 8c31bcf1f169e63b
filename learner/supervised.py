"""Supervised fine-tuning: the learner's updates on rows of prompts and responses, without actors.

Rows take the place of groups. Everything else is as in reinforcement learning: an update is the same commands on the
same train step, and checkpoints, metrics, followers and the written model are the same.
"""

import copy
import dataclasses
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from absl import logging

from bridge.liveness import Liveness, end_phase, report_phase
from configs.run_folder import RunFolder
from configs.schema import Config
from configs.sections import PackingConfig
from configs.sections.evaluation import HELD_OUT
from learner.checkpoint import MAX_FAILED_IN_A_ROW, Checkpoints
from learner.commands import Accumulate, Apply, SaveModel, ScoreBatch
from learner.data.problem import Problem
from learner.data.tokenizer import load_tokenizer
from learner.distributed.channel import SingleProcess
from learner.distributed.sharding import make_mesh
from learner.evaluation.eval_sets import ProblemSet
from learner.heartbeat import Stopped
from learner.learner_process import LearnerProcess, compute
from learner.metrics.metrics_writer import MetricsWriter
from learner.model.architecture import Architecture
from learner.open_run import open_board, open_problems, report_ready
from learner.policy_trainer import NoPublisher
from learner.replicate import Replicator
from learner.restore import WeightLoader, load_base, restore, trainer_of
from learner.run_context import open_context
from learner.update.auto_shape import propose
from learner.update.example_stream import ExampleStream, group_of, pack_examples
from learner.update.packing import parts
from learner.update.train_step import build_train_step
from learner.update_metrics import UpdateMetrics

_OF_SAMPLES = ("ess", "lag/", "mismatch_kl", "ratio/", "max_abs_", "reward/", "response/", "clip_fraction")
"""Name prefixes of an update's metrics that describe samples, rewards or importance ratios, which rows do not have."""


@dataclasses.dataclass(kw_only=True)
class SftRun(LearnerProcess):
    """Components of a supervised run."""

    examples: ExampleStream
    sets: Sequence[ProblemSet]
    """Evaluation sets, the held-out rows first."""
    num_updates: int

    @property
    def step(self) -> int:
        """Number of updates made."""
        return self.num_updates

    def begin_save(self) -> dict[str, Any]:
        """Returns the position in the rows."""
        return {"examples": copy.deepcopy(self.examples.get_state())}


def open_sft(
    config: Config,
    folder: pathlib.Path,
    model_folder: pathlib.Path,
    *,
    liveness: Liveness | None = None,
    lead: Replicator | None = None,
) -> SftRun:
    """Builds the leading process of a supervised run, and resumes from a checkpoint if one exists.

    Arguments and errors are those of `learner.open_run.open_run`; followers use `join_run`.
    """
    report_phase("reading the rows")
    architecture = Architecture.from_hf(model_folder)
    template = config.prompts.template_settings
    tokenizer = load_tokenizer(model_folder, vocab_size=architecture.vocab_size, template=template)
    problems = open_problems(config, folder, tokenizer)
    lead = lead or Replicator(SingleProcess())
    report_phase("setting up the devices")
    steps = build_train_step(architecture, config, make_mesh(**config.mesh.axes, devices=None), lead.hosts)
    context = open_context(config, folder, lead, liveness or Liveness.of_this_process())
    try:
        checkpoints = Checkpoints(
            RunFolder(folder).checkpoints,
            keep=config.checkpoint.keep,
            max_failed_in_a_row=MAX_FAILED_IN_A_ROW,
            hosts=lead.hosts,
        )
        weights = WeightLoader(config, architecture)
        report_phase("reading the model's weights")
        base = load_base(weights, model_folder)
        step, state, _, host_state = restore(checkpoints, steps, weights, folder, model_folder, base)
        context.store.record_restore(context.incarnation, step)
        trainer = trainer_of(
            config, architecture, steps, state, weights, model_folder,
            publisher=NoPublisher(), checkpoints=checkpoints, base=base,
        )  # fmt: skip
        examples = ExampleStream(config, problems.prompts)
        if host_state is not None:
            examples.set_state(host_state["examples"])
        view = open_board(config, folder, step, context.incarnation)
        metrics = MetricsWriter(folder, restored_step=step, incarnation=context.incarnation, view=view)
    except BaseException:
        context.heartbeat.stop()
        raise
    run = SftRun(
        config=config,
        folder=folder,
        architecture=architecture,
        tokenizer=tokenizer,
        store=context.store,
        trainer=trainer,
        lead=lead,
        last_saved_step=step,
        checkpoints=checkpoints,
        metrics=metrics,
        timeline=context.timeline,
        heartbeat=context.heartbeat,
        lock=context.lock,
        finished_step=context.finished_step,
        examples=examples,
        sets=problems.sets,
        num_updates=step,
    )
    run.heartbeat.report_progress()
    end_phase()
    report_ready(run, context.incarnation)
    return run


def train_sft(run: SftRun) -> None:
    """Trains until `run.num_updates` updates are made, and writes the model to the run folder.

    Raises Stopped, after a checkpoint of the last update, if a learner process was asked to stop, and NotFiniteError
    after too many consecutive updates with a non-finite loss or gradient.
    """
    try:
        _train_all(run)
    except Stopped:
        run.save_on_stop()
        raise


def _train_all(run: SftRun) -> None:
    num_skipped, every = run.trainer.num_skipped, run.config.checkpoint.every_n_steps
    update_metrics = UpdateMetrics(run.architecture, lora=run.config.lora, num_skipped=num_skipped)
    evaluate(run)
    while run.step < run.config.run.num_updates:
        update(run, update_metrics)
        run.on_stop = run.checkpoint()
        run.heartbeat.updated()
        evaluate(run)
        if run.step // every > run.last_saved_step // every:
            with run.timeline.measure("save"):
                run.save()
        run.checkpoints.committed()
    with run.timeline.measure("save"):
        run.save_last()
    target = RunFolder(run.folder).model(run.step)
    if not target.exists():
        with run.timeline.measure("write model"):
            run.do(SaveModel(str(target), tokenizer_from=str(run.tokenizer.folder)))
    run.store.finish(run.step)
    logging.info("finished step=%d model=%s", run.step, target)


def update(run: SftRun, update_metrics: UpdateMetrics) -> None:
    """Makes an update on the next rows, and writes its metrics."""
    for micro in run.examples.next_update():
        _, start, end = compute(run, Accumulate(micro), "train", step=run.step)
        update_metrics.add_batch(micro, start, end)
        run.heartbeat.check()
        run.heartbeat.report_progress()
    run.on_stop = None  # the update changes the parameters
    metrics, start, end = compute(run, Apply(0), "apply", step=run.step + 1, epoch=0)
    update_metrics.add_epoch(metrics, start, end)
    run.num_updates += 1
    row, _ = update_metrics.row(time.monotonic())
    row |= {
        "num_compilations": run.trainer.steps.num_compilations,
        "checkpoint/failed": run.checkpoints.num_failed,
        **run.examples.metrics(),
    }
    run.metrics.write("step", run.step, {k: v for k, v in row.items() if not k.startswith(_OF_SAMPLES)})
    update_metrics.check_skipped(run.step)


def evaluate(run: SftRun) -> None:
    """Computes and writes the loss of each evaluation set that is due and has no row of this step yet."""
    for one in run.sets:
        name = "eval" if one.name == HELD_OUT else f"eval/{one.name}"
        if not is_due(run.step, every=one.config.every_n_steps or 0, last=run.config.run.num_updates):
            continue
        if run.step in run.metrics.steps(name):  # before a restart
            continue
        with run.timeline.measure("evaluate"):
            loss = mean_loss(run, one.problems)
        run.metrics.write(name, run.step, {f"{name}/loss": loss}, set=one.name, problems=len(one.problems))


def is_due(step: int, *, every: int, last: int) -> bool:
    """Returns True at the start, at the end, and every `every` updates if that is not 0."""
    return step == 0 or step >= last or (every > 0 and step % every == 0)


def shape_of(problems: Sequence[Problem], config: Config) -> PackingConfig:
    """Returns the cheapest micro-batch shape for these rows; without `packing.auto` the configured one."""
    if not config.packing.auto:
        return config.packing
    sizes = [part.size for one in problems for part in parts(group_of(one), config.packing)]
    return propose([sizes], config)


def mean_loss(run: SftRun, problems: Sequence[Problem]) -> float:
    """Returns the mean negative log-likelihood over the rows' trained tokens, in nats."""
    total, num_tokens = 0.0, 0
    for micro in pack_examples(problems, run.config, shape_of(problems, run.config)):
        logprobs = run.do(ScoreBatch(micro.batch))
        total -= float(np.sum(logprobs, where=np.asarray(micro.batch.loss_mask), dtype=np.float64))
        num_tokens += int(np.count_nonzero(micro.batch.loss_mask))
        run.heartbeat.check()
        run.heartbeat.report_progress()
    return total / num_tokens
