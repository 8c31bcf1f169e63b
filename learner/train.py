"""The training loop: accumulate, update, publish, checkpoint, finish.

When the effective sample size of a full batch is below the floor, the batch is not trained: its tickets are issued
again, and the policy stands still until a full batch by its own, current weights is there
(`RolloutStream.drop_update`). That batch is trained whatever its ESS, since nothing fresher exists. What is in progress
on older weights is aborted and begun anew. The papers' ratio (equation 5) is a whole sequence's; the ESS here is over
tokens, as in their public code.
"""

import dataclasses
import time
from typing import Any

from absl import logging

from configs.run_folder import RunFolder
from learner import parity
from learner.evaluation.pinned_requests import PROBE_TOKENS, probe_problems
from learner.heartbeat import Stopped
from learner.policy_trainer import Accumulate, AccumulateAgain, Apply, Command, Discard, Publish, SaveModel, ScoreBatch
from learner.run import Run
from learner.schedule.ticket_ledger import training_sampling
from learner.update.packing import MicroBatch
from learner.update_metrics import StepMetrics


def is_off_policy(ess: float, *, floor: float, is_fresh: bool, step: int) -> bool:
    """Whether the update that is now full must not be made.

    Args:
      ess: the batch's effective sample size, 0 to 1, over tokens.
      floor: `rounds.ess_floor`.
      is_fresh: the batch is by the current weights alone.
      step: the learner's.
    """
    if ess >= floor:
        return False
    if is_fresh:
        logging.warning(
            "step=%d: a batch by the current weights alone has ess=%.3f, below rounds.ess_floor=%.3f; engine and "
            "learner differ more than the floor allows (see mismatch_kl)",
            step,
            ess,
            floor,
        )
        return False
    logging.warning("update stopped step=%d ess=%.3f floor=%.3f", step, ess, floor)
    return True


def train(run: Run) -> None:
    """Trains until `run.num_updates` steps are done; the result is in the run folder.

    Raises:
      Stopped: a process of the learner was asked to end; with checkpoint.on_stop what may be saved is.
    """
    try:
        train_all(run)
    except Stopped:
        run.save_on_stop()
        raise


def train_all(run: Run) -> None:
    """The updates, and what ends a run; nothing where one that is finished was started again."""
    if is_finished(run):
        run.store.finish(run.step)  # said again: the run was taken up
        logging.info("finished already step=%d", run.step)
        return
    publish(run)
    await_weights(run)  # actors need a first version
    step_metrics = StepMetrics(
        run.config.optimizer,
        run.architecture,
        stream=run.stream,
        store=run.store,
        num_skipped=int(run.trainer.state.skipped_updates),
        lora=run.config.lora,
    )
    batches = run.stream.micro_batches()
    while run.step < run.config.run.num_updates:
        micro = next(batches)  # waits until complete groups are there
        run.heartbeat.report_progress()
        accumulate(run, micro, step_metrics)
        if not micro.ends_update:
            continue
        check_parity(run)
        run.heartbeat.report_progress()
        if below_ess_floor(run):
            drop(run, step_metrics)
            continue
        update(run, step_metrics)
        if run.config.checkpoint.on_stop and may_save(run, ends_round=micro.ends_round):
            run.on_stop = run.checkpoint()
        run.heartbeat.updated()
        run.evaluations.poll()
        if run.publisher.is_due(step=run.step, ends_round=micro.ends_round):
            publish(run)
        if micro.ends_round:
            run.metrics.write("round", run.step, run.stream.end_round())
        if is_save_due(run, ends_round=micro.ends_round):
            with run.stream.aside("save"):
                run.save()
        run.stream.acknowledge(run.checkpoints.committed())
        if run.config.publish.when == "round_end" and micro.ends_round:
            await_weights(run)  # the next round is sampled by them alone
    finish(run)


def accumulate(run: Run, micro: MicroBatch, step_metrics: StepMetrics) -> None:
    """Adds a micro-batch's gradient in the first pass over its batch."""
    _, start, end = compute(run, Accumulate(micro), "train", step=run.step, groups=",".join(micro.ticket_ids))
    step_metrics.add_batch(micro, start, end)
    run.heartbeat.report_progress()
    run.stream.poll()  # a race may be decided, or the oldest group give way, while this process computes


def accumulate_cached(run: Run, step_metrics: StepMetrics, epoch: int) -> None:
    """Adds the gradients of the whole batch in a later pass, from the micro-batches of the first one."""
    for index, ticket_ids in enumerate(run.trainer.kept.ticket_ids):
        groups = ",".join(ticket_ids)
        _, start, end = compute(run, AccumulateAgain(index), "train", step=run.step, groups=groups, epoch=epoch)
        step_metrics.computed(start, end)
        run.heartbeat.report_progress()
        run.stream.poll()


def below_ess_floor(run: Run) -> bool:
    """Whether the ESS stop keeps the update that is full from being made."""
    floor = run.config.rounds.ess_floor
    if floor == 0:
        return False
    ess = run.trainer.steps.ess(run.trainer.state)
    stops = is_off_policy(ess, floor=floor, is_fresh=run.stream.group_filter.fresh_from is not None, step=run.step)
    if stops:
        run.timeline.instant("ess stop", step=run.step, ess=ess)
    return stops


def drop(run: Run, step_metrics: StepMetrics) -> None:
    """Undoes the update that is full; what is to be sampled by the current weights needs them published."""
    run.do(Discard())
    run.stream.drop_update()
    step_metrics.drop()
    if not run.publisher.is_published(run.step):
        publish(run)


def update(run: Run, step_metrics: StepMetrics) -> None:
    """Makes the update whose batch is full: an optimizer step for each pass over it; writes its metrics.

    Raises:
      NotFiniteError: too many optimizer steps in a row had a loss or a gradient that was not finite.
    """
    run.on_stop = None  # the parameters are others from here on
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
    step_metrics.check_skipped()


def apply(run: Run, step_metrics: StepMetrics, epoch: int) -> None:
    """Steps the optimizer, which ends a pass over the batch."""
    metrics, start, end = compute(run, Apply(epoch), "apply", step=run.step + 1, epoch=epoch)
    step_metrics.add_epoch(metrics, start, end)


def compute(run: Run, command: Command, name: str, **about: Any) -> tuple[Any, float, float]:
    """Has all processes compute something; its result, when it began and when it ended (monotonic seconds).

    The event log has it by its name, and whether it was compiled first.
    """
    num_before = run.trainer.steps.num_compilations
    start = time.monotonic()
    result = run.do(command)
    end = time.monotonic()
    compiled = {"compiled": True} if run.trainer.steps.num_compilations != num_before else {}
    run.timeline.took(name, start, end, **about, **compiled)
    return result, start, end


def publish(run: Run) -> None:
    """Hands the current weights over, and sends out the probe and the evaluations that are due for them.

    Both may be asked for before the weights are out: actors serve a ticket by its version or later ones only. Weights
    go out at once; an evaluation under way ends on newer ones, and one of its set that falls due meanwhile starts with
    a later publish. With evaluation.at_publish=wait what is out is waited for first: it is of one version.
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
    """Waits until the weights handed over are out; who reaches a bucket alone hears of them later."""
    with run.stream.aside("await weights"):
        run.publisher.wait_until_published()
    run.heartbeat.report_progress()


def start_probe(run: Run) -> None:
    """Asks for a few responses by the weights handed over; the next step waits for them, so they are short."""
    assert run.publisher.version is not None
    sampling = training_sampling(run.config, run.tokenizer.stop_token_ids)
    sampling = dataclasses.replace(sampling, max_tokens=min(sampling.max_tokens, PROBE_TOKENS))
    run.probe.start(probe_problems(run.held_out), sampling, version=run.publisher.version, round=run.stream.round)


def check_parity(run: Run) -> None:
    """Waits for the probe that is out, if one is, and compares it with the learner's own logprobs."""
    version = run.probe.version
    if version is not None:
        with run.stream.aside("probe"):
            worst = parity.settle(
                run.probe,
                score=lambda batch: run.do(ScoreBatch(batch)),
                packing=run.stream.packing,
                bound=run.config.parity_bound,
                fence=run.stream.fence,
                before_score=run.heartbeat.report_progress,
            )
        run.metrics.write("probe", version.step, {"parity/max_abs_dlogprob": worst}, version=str(version))


def is_save_due(run: Run, *, ends_round: bool) -> bool:
    """Every n steps; by rounds the first round's end after.

    Saved at a round's end, a checkpoint's weights are the ones the next round is sampled by, so a restart
    can use every group of that round.
    """
    every = run.config.checkpoint.every_n_steps
    return may_save(run, ends_round=ends_round) and run.step // every > run.last_saved_step // every


def may_save(run: Run, *, ends_round: bool) -> bool:
    """After any update, by rounds after a round's last one."""
    return run.config.publish.when == "every" or ends_round


def is_finished(run: Run) -> bool:
    """Whether an earlier start did all, to the model in the run folder; not where more steps are asked for since."""
    return (
        run.finished_step == run.step >= run.config.run.num_updates and RunFolder(run.folder).model(run.step).exists()
    )


def finish(run: Run) -> None:
    """The last evaluations, checkpoint and the model in Hugging Face's format."""
    if not run.publisher.is_published(run.step):
        publish(run)
    check_parity(run)
    with run.timeline.measure("await evaluations"):
        run.evaluations.wait()
    if run.evaluations.is_due(run.step):  # an earlier one was still out when the last weights were published
        assert run.publisher.version is not None
        run.evaluations.start(version=run.publisher.version, round=run.stream.round)
        with run.timeline.measure("await evaluations"):
            run.evaluations.wait()
    await_weights(run)
    with run.timeline.measure("save"):
        run.stream.acknowledge(run.checkpoints.wait())
        run.heartbeat.report_progress()
        if (run.checkpoints.latest or 0) != run.step:
            run.save()
            run.stream.acknowledge(run.checkpoints.wait())
            run.heartbeat.report_progress()
            run.checkpoints.check_saved(run.step)
    target = RunFolder(run.folder).model(run.step)
    if not target.exists():
        with run.timeline.measure("write model"):
            run.do(SaveModel(str(target), tokenizer_from=str(run.tokenizer.folder)))
        run.heartbeat.report_progress()
    run.publisher.finish()  # a bucket may take its time, and has the last weights too
    run.store.finish(run.step)  # last: actors end by it
    logging.info("finished step=%d model=%s", run.step, target)
