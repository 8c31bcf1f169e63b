"""PipelineRL's safety stop: no update from a batch that is too far off-policy (NeurIPS version, Algorithm 2).

When the effective sample size of a full batch is below the floor, the batch is not trained: its tickets are issued
again, and the policy stands still until a full batch by its own, current weights is there. That batch is trained
whatever its ESS, since nothing fresher exists. What is in progress on older weights is aborted and begun anew.
"""

from absl import logging

from learner.run import Run


def is_batch_off_policy(run: Run) -> bool:
    """Whether the update that is now full must not be made."""
    floor = run.config.rounds.ess_floor
    if floor == 0:
        return False
    ess = run.steps.ess(run.state)
    if ess >= floor:
        return False
    if run.queue.fresh_from is not None:
        logging.warning(
            "step=%d: a batch by the current weights alone has ess=%.3f, below rounds.ess_floor=%.3f; engine and "
            "learner differ more than the floor allows (see mismatch_kl)",
            run.step,
            ess,
            floor,
        )
        return False
    logging.warning("update stopped step=%d ess=%.3f floor=%.3f", run.step, ess, floor)
    run.timeline.instant("ess stop", step=run.step, ess=ess)
    return True


def drop_batch(run: Run) -> None:
    """Undoes the update that is full, and takes only groups by the current weights until the next one is.

    All that is in progress on older weights is asked for anew at once: it would be turned away in the end.
    """
    run.state = run.steps.discard(run.state)
    run.queue.take_back([t.id for t in run.planner.put_back()])
    run.queue.poll()
    run.queue.fresh_from = run.step
    tickets = run.planner.renew(step=run.step, keep=run.queue.keep_fresh(run.step))
    run.store.withdraw([t.id for t in tickets])
    run.store.put_tickets(tickets)
    run.num_ess_stops += 1
