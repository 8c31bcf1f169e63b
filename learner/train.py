"""Training loop: accumulate, update, publish, checkpoint, finish.

A full batch whose effective sample size (ESS) is below the floor is not trained (`RolloutStream.drop_update`). Its
tickets are reissued, samples in progress on older weights are restarted, and the policy waits for a batch by its
current weights. That batch is trained at any ESS, since no fresher samples exist. The papers' ratio (equation 5) is per
sequence; the ESS here is per token, as in their public code.

A full batch with groups of an actor that was fenced meanwhile is not trained either; its tickets are reissued.
"""

import dataclasses
import pathlib
import time

import jax
from absl import logging

from configs.run_folder import RunFolder
from learner import parity
from learner.commands import Accumulate, AccumulateAgain, Apply, Discard, Merge, Publish, SaveModel
from learner.evaluation.pinned_requests import PROBE_TOKENS, probe_problems
from learner.gradient_helper.helper_client import GradientHelper
from learner.heartbeat import Stopped
from learner.learner_process import compute
from learner.run import Run
from learner.schedule.ticket_ledger import training_sampling
from learner.update.packing import MicroBatch
from learner.update_metrics import StepMetrics

HELPER_POLL_S = 0.005
"""Interval between two looks at a helper while the learner waits for it, in seconds."""


def is_off_policy(ess: float, *, floor: float, is_fresh: bool, step: int) -> bool:
    """Returns True if the full batch must be discarded by the ESS stop.

    `ess` is the batch's effective sample size over tokens, 0 to 1. A batch that is `is_fresh`, made by the current
    weights only, is trained at any ESS.
    """
    if ess >= floor:
        return False
    if is_fresh:
        logging.warning(
            "ESS below the floor for a batch of the current weights step=%d ess=%.3f rounds.ess_floor=%.3f; engine and "
            "learner differ more than the floor allows (see mismatch_kl)",
            step,
            ess,
            floor,
        )
        return False
    logging.warning("update discarded step=%d ess=%.3f floor=%.3f", step, ess, floor)
    return True


def train(run: Run) -> None:
    """Trains until `run.num_updates` steps are done, and writes the model to the run folder.

    Raises Stopped if a learner process was asked to stop; a checkpoint is saved first where one is allowed
    (`may_save`).
    """
    try:
        train_all(run)
    except Stopped:
        run.save_on_stop()
        raise


def train_all(run: Run) -> None:
    """Runs all updates and finishes the run; returns immediately if it is already finished."""
    if is_finished(run):
        run.store.finish(run.step)  # Acquiring leadership cleared the finished flag; set it again.
        logging.info("finished already step=%d", run.step)
        return
    publish(run)
    await_weights(run)  # actors need a first version
    give_devices_back(run)
    step_metrics = StepMetrics(
        run.architecture,
        stream=run.stream,
        store=run.store,
        num_skipped=run.trainer.num_skipped,
        lora=run.config.lora,
        critic=run.trainer.critic_architecture,
    )
    batches = run.stream.micro_batches()
    while run.step < run.config.run.num_updates:
        micro = next(batches)  # blocks until complete groups arrive
        run.heartbeat.report_progress()
        if run.helper is None:
            take_devices(run)
            accumulate(run, micro, step_metrics)
        else:
            share(run, run.helper, micro, step_metrics)
        if not micro.ends_update:
            continue
        check_parity(run)
        run.heartbeat.report_progress()
        is_fenced = run.stream.has_fenced_groups
        if is_fenced or below_ess_floor(run):
            drop(run, step_metrics, needs_fresh=not is_fenced)
            continue
        update(run, step_metrics)
        if may_save(run, ends_round=micro.ends_round):
            run.on_stop = run.checkpoint()
        run.heartbeat.updated()
        run.evaluations.poll()
        if run.publisher.is_due(step=run.step, ends_round=micro.ends_round):
            publish(run)
        if micro.ends_round:
            end_round(run)
        if is_save_due(run, ends_round=micro.ends_round):
            with run.stream.aside("save"):
                run.save()
        run.stream.acknowledge(run.checkpoints.committed())
        if run.config.publish.when == "round_end" and micro.ends_round:
            await_weights(run)  # the next round is sampled by them alone
            give_devices_back(run)
    finish(run)


def take_devices(run: Run) -> None:
    """Takes the devices from the engines that share them (actor.colocated), once these owe the learner nothing."""
    if run.has_devices:
        return
    with run.stream.aside("await engines"):
        run.evaluations.wait()
        run.probe.await_groups()
        run.take_devices(run.heartbeat.check)
    run.heartbeat.report_progress()


def give_devices_back(run: Run) -> None:
    """Lets the engines have the devices that they share with the learner."""
    if run.turn is not None:
        with run.stream.aside("offload"):
            run.give_devices_back()


def accumulate(run: Run, micro: MicroBatch, step_metrics: StepMetrics) -> None:
    """Adds the gradient of a micro-batch as it arrives; later epochs over the batch use `accumulate_cached`."""
    _, start, end = compute(run, Accumulate(micro), "train", step=run.step, groups=",".join(micro.ticket_ids))
    step_metrics.add_batch(micro, start, end)
    run.heartbeat.report_progress()
    run.stream.poll()  # races may be decided, or the oldest group evicted, during the computation


def share(run: Run, helper: GradientHelper, micro: MicroBatch, step_metrics: StepMetrics) -> None:
    """Trains a micro-batch where there is room: the helper's devices first, then the learner's own.

    After the update's last micro-batch it returns once all are in the learner's accumulator. Engines that share the
    learner's devices (actor.colocated) keep them until then.
    """
    helper.add(micro)
    run.look_at_helper(is_over=micro.ends_update)
    while run.has_devices and not micro.ends_update and (own := helper.next_own()) is not None:
        accumulate(run, own, step_metrics)
    if not micro.ends_update:
        return
    take_devices(run)
    while not helper.is_complete:
        if (file := helper.hand_over()) is not None:
            merge(run, helper, file, step_metrics)
        elif (own := helper.next_own()) is not None:
            accumulate(run, own, step_metrics)
        else:
            run.heartbeat.check()
            run.heartbeat.report_progress()
            time.sleep(HELPER_POLL_S)
    helper.finish()
    helper.check_divisor(run.trainer.steps.denominator(run.trainer.state))


def merge(run: Run, helper: GradientHelper, file: pathlib.Path, step_metrics: StepMetrics) -> None:
    """Adds the helper's partial gradient to the learner's, and lets the engines have its devices."""
    _, start, end = compute(run, Merge(str(file)), "merge", step=run.step)
    step_metrics.computed(start, end)
    micros, seconds = helper.merged()
    step_metrics.add_helped(micros, seconds * run.scale_down.num_helping / jax.device_count())


def end_round(run: Run) -> None:
    """Writes the round's metrics, and those of its helper."""
    of_helper: dict[str, float] = {}
    if run.helper is not None:
        stats, clock = run.helper.end_update(), run.stream.clock
        of_helper = {
            "helper/released_at": run.scale_down.released_at,
            "helper/batches": stats.num_batches,
            "helper/compute_s": stats.compute_s,
            "helper/start_s": stats.start_s,
            "helper/hand_over_s": stats.hand_over_s,
            "helper/lost": stats.num_lost,
        }
        run.scale_down.end_round(
            clock,
            is_long=run.stream.planner.round_is_long,
            start_s=stats.start_s,
            hand_over_s=stats.hand_over_s,
            helper_s=stats.compute_s,
        )
    run.metrics.write("round", run.step, run.stream.end_round() | of_helper)


def accumulate_cached(run: Run, step_metrics: StepMetrics, epoch: int) -> None:
    """Adds the gradients of the whole batch in a later epoch, from the epoch buffer."""
    for index, ticket_ids in enumerate(run.trainer.kept.ticket_ids):
        groups = ",".join(ticket_ids)
        _, start, end = compute(run, AccumulateAgain(index), "train", step=run.step, groups=groups, epoch=epoch)
        step_metrics.computed(start, end)
        run.heartbeat.report_progress()
        run.stream.poll()


def below_ess_floor(run: Run) -> bool:
    """Returns True if the ESS stop applies to the full batch, and records the stop in the event log."""
    floor = run.config.rounds.ess_floor
    if floor == 0:
        return False
    ess = run.trainer.steps.ess(run.trainer.state)
    stops = is_off_policy(ess, floor=floor, is_fresh=run.stream.group_filter.fresh_from is not None, step=run.step)
    if stops:
        run.timeline.instant("ess stop", step=run.step, ess=ess)
    return stops


def drop(run: Run, step_metrics: StepMetrics, *, needs_fresh: bool) -> None:
    """Discards the full batch, and lets the engines have the devices for the next one.

    If it `needs_fresh` samples, the current weights are published unless they are.
    """
    take_devices(run)
    run.do(Discard())
    if run.helper is not None:
        run.helper.end_update()
    run.stream.drop_update(needs_fresh=needs_fresh)
    step_metrics.drop()
    if needs_fresh and not run.publisher.is_published(run.step):
        publish(run)
    give_devices_back(run)


def update(run: Run, step_metrics: StepMetrics) -> None:
    """Makes an update from the full batch, one optimizer step per epoch, and writes its metrics.

    Raises NotFiniteError if too many consecutive optimizer steps had a non-finite loss or gradient.
    """
    take_devices(run)
    run.on_stop = None  # the update changes the parameters
    apply(run, step_metrics, epoch=0)
    for epoch in range(1, run.config.rounds.epochs):
        run.heartbeat.check()
        run.heartbeat.report_progress()
        accumulate_cached(run, step_metrics, epoch)
        apply(run, step_metrics, epoch)
    run.stream.end_update()
    row, ticket_ids = step_metrics.row(time.monotonic())
    row |= {
        "num_compilations": run.trainer.steps.num_compilations,
        "checkpoint/failed": run.checkpoints.num_failed,
        **run.publisher.metrics(),
    }
    run.metrics.write("step", run.step, row, groups=ticket_ids)
    run.samples.trained(run.step, run.stream.take_samples())
    step_metrics.check_skipped(run.step)


def apply(run: Run, step_metrics: StepMetrics, epoch: int) -> None:
    """Makes the optimizer step that ends an epoch."""
    metrics, start, end = compute(run, Apply(epoch), "apply", step=run.step + 1, epoch=epoch)
    step_metrics.add_epoch(metrics, start, end)


def publish(run: Run) -> None:
    """Publishes the current weights, and starts the probe and the evaluations that are due.

    Both may start before the weights are available, because actors serve a ticket only by its version or a later one.
    An evaluation in progress finishes on newer weights, and a set that comes due meanwhile starts at a later publish.
    With evaluation.at_publish=wait, publishing waits for evaluations in progress, so each uses one version.
    """
    with run.stream.aside("hand over"):
        if run.evaluations.waits:
            run.evaluations.wait()
        is_probed = run.publisher.probe_is_due
        is_evaluated = run.evaluations.is_due(run.step)
        run.do(Publish(run.step, must_publish=is_probed or is_evaluated))
        run.heartbeat.report_progress()
        if is_probed:
            start_probe(run)
        if is_evaluated:
            assert run.publisher.version is not None
            run.evaluations.start(version=run.publisher.version, round=run.stream.round)


def await_weights(run: Run) -> None:
    """Waits until the published weights are available, except in buckets, whose uploads continue in the background."""
    with run.stream.aside("await weights"):
        run.publisher.wait_until_published()
    run.heartbeat.report_progress()


def start_probe(run: Run) -> None:
    """Requests a few short responses by the published weights; they are short because the next step waits for them."""
    assert run.publisher.version is not None
    sampling = training_sampling(run.config, run.tokenizer.stop_token_ids)
    sampling = dataclasses.replace(sampling, max_tokens=min(sampling.max_tokens, PROBE_TOKENS))
    run.probe.start(probe_problems(run.held_out), sampling, version=run.publisher.version, round=run.stream.round)


def check_parity(run: Run) -> None:
    """Waits for the pending probe, if any, and compares its logprobs with the learner's."""
    version = run.probe.version
    if version is not None:
        take_devices(run)

        def fence(actor: str, reason: str, off_nats: float) -> None:
            run.stream.fence(actor, reason, off_nats)
            run.give_devices_back()  # engines generate the probe again

        with run.stream.aside("probe"):
            worst = parity.settle(
                run.probe,
                score=run.score,
                packing=run.stream.packing,
                routing=run.stream.routing,
                bound=run.config.parity_bound,
                fence=fence,
                before_score=run.heartbeat.report_progress,
            )
        run.metrics.write("probe", version.step, {"parity/max_abs_dlogprob": worst}, version=str(version))


def is_save_due(run: Run, *, ends_round: bool) -> bool:
    """Returns True if a checkpoint is due: every n steps, in round mode at the next round end.

    A checkpoint at a round end has the weights that sample the next round, so a restart can use all its groups.
    """
    every = run.config.checkpoint.every_n_steps
    return may_save(run, ends_round=ends_round) and run.step // every > run.last_saved_step // every


def may_save(run: Run, *, ends_round: bool) -> bool:
    """Returns True if a checkpoint is allowed: after any update, in round mode only at a round end."""
    return run.config.publish.when == "every" or ends_round


def is_finished(run: Run) -> bool:
    """Returns True if an earlier start finished all steps and wrote the model; False if more steps are requested."""
    return (
        run.finished_step == run.step >= run.config.run.num_updates and RunFolder(run.folder).model(run.step).exists()
    )


def finish(run: Run) -> None:
    """Runs the last evaluations, saves the last checkpoint and writes the model in Hugging Face format."""
    if not run.publisher.is_published(run.step):
        publish(run)
    check_parity(run)
    with run.timeline.measure("await evaluations"):
        run.evaluations.wait()
    if run.evaluations.is_due(run.step):  # an earlier evaluation was in progress at the last publish
        assert run.publisher.version is not None
        give_devices_back(run)
        run.evaluations.start(version=run.publisher.version, round=run.stream.round)
        with run.timeline.measure("await evaluations"):
            run.evaluations.wait()
    take_devices(run)
    await_weights(run)
    with run.timeline.measure("save"):
        run.save_last()
    target = RunFolder(run.folder).model(run.step)
    if not target.exists():
        with run.timeline.measure("write model"):
            run.do(SaveModel(str(target), tokenizer_from=str(run.tokenizer.folder)))
        run.heartbeat.report_progress()
    run.publisher.finish()  # waits for buckets, which get the last version as well
    run.store.finish(run.step)  # last, because actors exit on it
    logging.info("finished step=%d model=%s", run.step, target)
