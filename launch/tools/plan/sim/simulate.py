"""Simulation of a whole run: learner and engines of a config, with the hardware and workload of a profile."""

import functools

from configs.schema import Config
from launch.tools.plan.control_plane.capacity import StoreQueue
from launch.tools.plan.frontier import with_width
from launch.tools.plan.profile import Profile
from launch.tools.plan.sim.actors import SimActors
from launch.tools.plan.sim.event_queue import EventQueue, Lag, SimRecorder, SimResult
from launch.tools.plan.sim.fleet import ServedGroup, Totals
from launch.tools.plan.sim.sim_learner import SimLearner
from launch.tools.plan.workload import Lengths


def simulate(
    config: Config, profile: Profile, *, num_updates: int, warmup_updates: int = 0, seed: int = 0
) -> SimResult:
    """Simulates `warmup_updates + num_updates` updates of rounds.epochs epochs; the last `num_updates` count.

    A width that a run chooses after its first round (admission.width=auto) applies from the start. Not modeled:
    evaluations, probes, failures, rounds.ess_floor (which requires real gradients), elastic engines. max_num_seqs is
    the profile's. All actor hosts get a version when the last one has it. Raises ValueError if no step counts, or the
    run cannot continue (for example, a response fits no engine).
    """
    if num_updates < 1 or warmup_updates < 0:
        raise ValueError(f"expected at least 1 update after >= 0 of warm-up, got {num_updates} and {warmup_updates}")
    if profile.num_learner_chips == 0 and config.publish.when == "every":
        raise ValueError(
            "num_learner_chips=0 (the learner trains on the engines' chips) requires publish.when=round_end; in "
            "window mode no rollout ends and frees its chips"
        )
    config = with_width(config, profile)
    calendar, recorder = EventQueue(), SimRecorder()
    last = warmup_updates + num_updates
    marks: list[tuple[float, Totals]] = []

    def on_step(step: int) -> None:
        if step == warmup_updates:
            recorder.is_on = True
        elif step > warmup_updates:
            recorder.num_steps += 1
        if step in (warmup_updates, last):
            marks.append((calendar.now_s, rollout.totals()))

    learner = SimLearner(config, profile, calendar, recorder, on_step=on_step, last_step=last, seed=seed)
    store = None if profile.store is None else StoreQueue(config, profile, profile.store, calendar)
    lengths = Lengths(profile.response_tokens, profile.prompt_tokens, seed=seed)
    rollout = SimActors(
        config,
        profile,
        lengths,
        calendar,
        learner.on_group if store is None else functools.partial(_hand_in, store, learner),
        on_claim=learner.on_claim,
        on_free_chips=learner.on_free_chips,
        pays=learner.pays,
        seed=seed,
    )
    if not warmup_updates:
        on_step(0)
    learner.start(rollout)
    while not learner.is_done:
        if not calendar.step():
            raise ValueError(
                f"the run stands still after {learner.step} steps: nothing is left to happen "
                f"(preset {config.preset}, {profile.num_engines} engines)"
            )
    return _outcome(profile, recorder, learner, store, *marks)


def _hand_in(store: StoreQueue, learner: SimLearner, group: ServedGroup) -> None:
    num_samples = group.ticket.num_samples
    store.put(
        num_samples=num_samples,
        prompt_tokens=(group.tokens - group.response_tokens) // num_samples,
        response_tokens=group.response_tokens,
        then=functools.partial(learner.on_group, group),
    )


def default_warmup(config: Config) -> int:
    """Returns the warm-up in steps: one round, or in window mode twice the groups in service and the next update."""
    if config.publish.when == "round_end":
        return config.rounds.groups_per_round // config.rounds.groups_per_update
    groups = -(-config.sequences // config.rounds.requests_per_group)
    return 2 * (1 + -(-groups // config.rounds.groups_per_update))


def _outcome(
    profile: Profile,
    recorder: SimRecorder,
    learner: SimLearner,
    store: StoreQueue | None,
    start: tuple[float, Totals],
    end: tuple[float, Totals],
) -> SimResult:
    (start_s, before), (end_s, after) = start, end
    seconds = end_s - start_s
    if seconds <= 0:
        raise ValueError("the measured steps took no time: the profile has no costs")
    engine_s = seconds * profile.num_engines
    return SimResult(
        seconds=seconds,
        num_steps=recorder.num_steps,
        num_samples=recorder.num_samples,
        step_s=seconds / recorder.num_steps,
        samples_per_s=recorder.num_samples / seconds,
        tokens_per_s=recorder.num_tokens / seconds,
        rounds=tuple(recorder.rounds),
        token_lag=Lag.of(recorder.token_lag),
        group_lag=Lag.of(recorder.group_lag),
        engine_utilisation=(after.busy_s - before.busy_s) / engine_s,
        engine_fill=(after.sequence_s - before.sequence_s) / engine_s / profile.engine.max_num_seqs,
        learner_utilisation=recorder.compute_s / seconds,
        wasted_tokens=after.wasted_tokens,
        recomputed_tokens=after.recomputed_tokens,
        num_preemptions=after.num_preemptions,
        num_dropped=dict(learner.dropped),
        store_s=0.0 if store is None else store.mean_s,
        update_s=learner.updates.mean_s,
    )
