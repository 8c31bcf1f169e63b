"""What is kept of vLLM's counts (tests/integration/test_partial_rollouts.py reads those of a real one)."""

from types import SimpleNamespace

from actor.vllm.convert import WARM_UP_STEPS, StatLogger
from bridge.heartbeat_types import DecodeSpeed


def scheduler(running: int, waiting: int, usage: float, skipped: int = 0) -> SimpleNamespace:
    return SimpleNamespace(
        num_running_reqs=running, num_waiting_reqs=waiting, num_skipped_waiting_reqs=skipped, kv_cache_usage=usage
    )


def iteration(tokens: int = 0, preempted: int = 0, *finished: tuple[str, int, int], prompt: int = 0) -> SimpleNamespace:
    return SimpleNamespace(
        num_generation_tokens=tokens,
        num_prompt_tokens=prompt,
        num_preempted_reqs=preempted,
        finished_requests=[
            SimpleNamespace(finish_reason=f, num_prompt_tokens=p, num_generation_tokens=r) for f, p, r in finished
        ],
    )


def test_counts_add_up_and_the_peak_begins_anew_with_new_weights():
    log = StatLogger()
    log.record(scheduler(4, 2, 0.75, skipped=1), iteration(4))
    log.record(scheduler(3, 0, 0.25), iteration(3, 2, ("length", 5, 9), ("abort", 5, 1)))
    log.record(None, None)
    stats = log.stats(is_idle=False)
    assert (stats.num_running, stats.num_waiting, stats.kv_usage, stats.kv_usage_peak) == (3, 0, 0.25, 0.75)
    assert (stats.num_sampled_tokens, stats.num_preempted, stats.num_finished) == (7, 2, 1)
    log.start_peak()
    log.record(scheduler(4, 3, 0.5, skipped=1), None)
    stats = log.stats(is_idle=False)
    assert (stats.num_waiting, stats.kv_usage_peak) == (4, 0.5)
    stats = log.stats(is_idle=True)
    assert (stats.num_running, stats.num_waiting, stats.kv_usage, stats.kv_usage_peak) == (0, 0, 0.0, 0.5)


def test_preemptions_that_an_update_asked_for_are_not_counted_when_they_arrive():
    log = StatLogger()
    log.record(scheduler(3, 0, 0.5), iteration(3))
    log.forgive_running()
    log.record(scheduler(3, 0, 0.5), iteration(2, 2))
    log.record(scheduler(3, 0, 0.5), iteration(3, 3))  # one of these is the third of the update's
    assert log.stats(is_idle=False).num_preempted == 2


def test_decode_speeds_time_steps_without_prompts_that_follow_each_other():
    now_s = 0.0
    log = StatLogger(clock=lambda: now_s)

    def step(seconds: float, left: int, tokens: int, prompt: int = 0) -> None:
        nonlocal now_s
        now_s += seconds
        log.record(scheduler(left, 0, 0.5), iteration(tokens, prompt=prompt))

    assert log.stats(is_idle=True).decode_speeds == ()
    step(100.0, 3, 3, prompt=30)
    for _ in range(WARM_UP_STEPS):
        step(50.0, 3, 3)  # compiles
    step(0.5, 3, 3)
    step(7.0, 3, 3, prompt=9)  # computes a prompt
    step(0.25, 2, 3)  # one of three ends
    step(0.125, 0, 2)
    step(90.0, 2, 2)  # the engine was empty before
    log.skip_interval()
    step(80.0, 2, 2)  # paused
    now_s += 60.0
    log.record(scheduler(2, 0, 0.5), None)  # part of a prompt, without a token
    step(0.25, 2, 3)
    row = DecodeSpeed(num_steps=4, num_tokens=11, seconds=1.125)  # 3, 3, 2, 3 tokens
    assert log.stats(is_idle=True).decode_speeds == (DecodeSpeed(), row)
