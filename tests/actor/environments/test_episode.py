import asyncio
import dataclasses
import itertools
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actor.environments.episode import RETRIES, Episodes
from actor.environments.protocol import EpisodeError
from actor.environments.transcript import EpisodeRequest
from bridge.rollout_types import Sampling
from configs.sections.actor import EnvironmentsConfig
from tests.actor.environments.chat import CHARACTERS, CHATML, EOS, IM_END, characters, rendering, user
from tests.actor.environments.scripted import ScriptedEngine, ScriptedPool, Turn, observed
from tests.actor.fakes import until

PROMPT = "0-9:"


def ids(text: str) -> list[int]:
    return characters().encode(text, add_special_tokens=False).ids


def text_of(tokens) -> str:
    return characters().decode(list(map(int, tokens)), skip_special_tokens=False)


def play(
    engine: ScriptedEngine,
    pool: ScriptedPool,
    *,
    template: str = "",
    prompt: str = PROMPT,
    max_tokens: int = 100,
    max_context_tokens: int = 1000,
    row: dict[str, Any] | None = None,
    **config: Any,
) -> Any:
    return asyncio.run(
        make(engine, pool, template, max_context_tokens, **config).play(episode(prompt, max_tokens, row))
    )


def make(engine, pool, template="", max_context_tokens=1000, retries=RETRIES, **config: Any) -> Episodes:
    one, limits = rendering(template), EnvironmentsConfig(**config)
    return Episodes(engine, cast(Any, pool), one, limits, max_context_tokens=max_context_tokens, retries=retries)


def episode(prompt: str = PROMPT, max_tokens: int = 100, row: dict[str, Any] | None = None) -> EpisodeRequest:
    return EpisodeRequest(
        environment="guess",
        prompt_tokens=np.asarray(ids(prompt), np.int32),
        row=row or {},
        sampling=Sampling(max_tokens=max_tokens, stop_token_ids=(EOS, IM_END), min_tokens=0),
        request_id="t.0",
        priority=5,
    )


def test_play_is_what_was_sampled_and_observed_in_turns():
    engine = ScriptedEngine([Turn(ids("5<eos>"), step=3), Turn(ids("7<eos>"), step=4)])
    pool = ScriptedPool([observed(">:"), observed(reward=1.0, done=True)])
    played = play(engine, pool)
    assert text_of(played.tokens) == "5<eos>>:7<eos>"
    assert played.episode.sampled.tolist() == [True, True, False, False, True, True]
    np.testing.assert_array_equal(played.logprobs, np.asarray([-2, -1, 0, 0, -2, -1], np.float32))
    assert [v.step for v in played.token_versions] == [3, 3, 3, 3, 4, 4]
    assert played.finish == "stop"
    assert played.episode.turn_rewards.dtype == np.float32 and played.episode.turn_rewards.tolist() == [0.0, 1.0]
    assert pool.actions == ["5", "7"]
    assert [text_of(r.tokens) for r in engine.requests] == ["0-9:", "0-9:5<eos>>:"]
    assert {r.priority for r in engine.requests} == {5}


def test_token_of_an_episode_has_the_routing_of_the_turn_that_first_had_it_as_input():
    engine = ScriptedEngine([Turn(ids("5<eos>"), routing=1), Turn(ids("7<eos>"), routing=2)])
    played = play(engine, ScriptedPool([observed(">:"), observed(done=True)]))
    # Of the prompt's four tokens and the first turn but its last one; then all before the very last token.
    assert played.routed_experts[:, 0, 0].tolist() == [1] * 5 + [2] * 4


@pytest.mark.parametrize(
    ("config", "max_tokens", "wanted"),
    [
        ({"max_turns": 2}, 100, [0.25, -0.5]),  # out of turns: beside what the turn earned
        ({}, 4, [-0.75]),  # no room for the observation
        ({}, 7, [0.25, -1.0]),  # the second turn is cut off: it earns nothing itself
        ({}, 100, [0.25, 0.5, 1.0]),  # done
    ],
)
def test_truncated_reward_is_added_to_the_last_turn_of_an_episode_that_a_budget_ended(config, max_tokens, wanted):
    engine = ScriptedEngine([Turn(ids("5<eos>")), Turn(ids("67<eos>")), Turn(ids("8<eos>"))])
    pool = ScriptedPool([observed(">:>", reward=0.25), observed("<:<", reward=0.5), observed(reward=1.0, done=True)])
    played = play(engine, pool, max_tokens=max_tokens, truncated_reward=-1.0, **config)
    assert played.episode.turn_rewards.tolist() == wanted and played.episode.turn_rewards.dtype == np.float32


def test_turns_that_earn_too_much_together_are_a_failure_and_no_reward():
    engine = ScriptedEngine([Turn(ids("5<eos>")), Turn(ids("7<eos>"))])
    pool = ScriptedPool([observed(">:", reward=1e6), observed(reward=1e6, done=True)])
    with pytest.raises(EpisodeError, match="its turns earn 2000000.0 together"):
        play(engine, pool, retries=0)


def test_play_with_a_template_begins_with_the_generation_prompt_masked():
    engine = ScriptedEngine([Turn(ids("5<|im_end|>"), step=7)])
    pool = ScriptedPool([observed(done=True)], start=[user("Board")])
    prompt = "<|im_start|>system\nPlay.<|im_end|>\n"
    row = {"messages": [{"role": "system", "content": "Play."}]}
    played = play(engine, pool, template=CHATML, prompt=prompt, row=row)
    opening = "<|im_start|>user\nBoard<|im_end|>\n<|im_start|>assistant\n"
    assert text_of(played.tokens) == opening + "5<|im_end|>"
    assert played.episode.sampled.sum() == 2 and played.episode.sampled[-2:].all()
    assert {v.step for v in played.token_versions} == {7}  # those observed first have the first sampled token's
    assert text_of(engine.requests[0].tokens) == prompt + opening


SCRIPTED_TURNS = st.lists(
    st.tuples(
        st.lists(st.integers(0, len(CHARACTERS) - 1), min_size=0, max_size=6),
        st.sampled_from([[], [EOS], [IM_END]]),
        st.integers(0, 2),  # by how many updates newer its weights are
        st.text(CHARACTERS[:-1], min_size=1, max_size=8).filter(str.strip),
        st.floats(-1, 1, width=32),
    ).filter(lambda t: t[0] or t[1]),
    min_size=1,
    max_size=6,
)


@given(
    script=SCRIPTED_TURNS,
    is_chat=st.booleans(),
    max_tokens=st.integers(60, 200),
    context=st.integers(90, 250),
    max_turns=st.integers(1, 6),
    max_turn_tokens=st.integers(0, 5),
    ends=st.booleans(),
)
def test_any_episode_is_exactly_what_the_engine_was_asked_to_go_on_with(
    script, is_chat, max_tokens, context, max_turns, max_turn_tokens, ends
):
    steps = list(itertools.accumulate(s[2] for s in script))
    engine = ScriptedEngine([Turn([*t, *end], step=v) for (t, end, *_), v in zip(script, steps, strict=True)])
    last = len(script) - 1
    # Beyond the script the engine has nothing to say: the last turn ends it.
    said = [observed(text, reward=r, done=ends and i == last) for i, (_, _, _, text, r) in enumerate(script)]
    prompt = "<|im_start|>user\nQ<|im_end|>\n" if is_chat else "Q"
    played = play(
        engine,
        ScriptedPool(said),
        template=CHATML if is_chat else "",
        prompt=prompt,
        row={"messages": [user("Q")]},
        max_tokens=max_tokens,
        max_context_tokens=context,
        max_turns=min(max_turns, len(script)),
        max_turn_tokens=max_turn_tokens,
    )
    runs = np.flatnonzero(np.diff(np.concatenate([[False], played.episode.sampled]).astype(int)) == 1)
    assert len(runs) == len(engine.requests) == played.episode.turn_rewards.size
    for start, request in zip(runs, engine.requests, strict=True):
        assert request.tokens.tolist() == [*ids(prompt), *played.tokens[:start].tolist()]
    sampled = [
        t for r, s in zip(engine.requests, engine.turns, strict=False) for t in s.tokens[: r.sampling.max_tokens]
    ]
    assert played.tokens[played.episode.sampled].tolist() == sampled
    assert not played.logprobs[~played.episode.sampled].any() and np.all(played.logprobs[played.episode.sampled] < 0)
    versions = [v.step for v in played.token_versions]
    assert versions == sorted(versions) and len(versions) == played.tokens.size
    assert played.tokens.size <= min(max_tokens, context - len(ids(prompt)))
    assert len({r.request_id for r in engine.requests}) == len(engine.requests)


def test_turn_that_uses_up_the_budget_is_truncated_and_no_action():
    engine = ScriptedEngine([Turn(ids("5<eos>")), Turn(ids("777777"))])
    pool = ScriptedPool([observed(">:", reward=0.5), observed(done=True, reward=1.0)])
    played = play(engine, pool, max_tokens=7)
    assert (text_of(played.tokens), played.finish) == ("5<eos>>:777", "length")
    assert played.episode.turn_rewards.tolist() == [0.5, 0.0]
    assert pool.actions == ["5"]
    assert engine.requests[1].sampling.max_tokens == 3


def test_turn_that_ends_with_the_budget_is_an_action():
    engine = ScriptedEngine([Turn(ids("5<eos>")), Turn(ids("7<eos>"))])
    played = play(engine, ScriptedPool([observed(">:"), observed(done=True, reward=1.0)]), max_tokens=6)
    assert (played.finish, played.episode.turn_rewards.tolist()) == ("stop", [0.0, 1.0])


@pytest.mark.parametrize(("max_tokens", "context"), [(4, 1000), (100, 8)])
def test_observation_that_leaves_no_room_ends_the_episode_and_is_left_out(max_tokens, context):
    engine = ScriptedEngine([Turn(ids("5<eos>"))])
    played = play(engine, ScriptedPool([observed(">:", reward=0.5)]), max_tokens=max_tokens, max_context_tokens=context)
    assert (text_of(played.tokens), played.finish, played.episode.turn_rewards.tolist()) == ("5<eos>", "length", [0.5])


def test_episode_that_is_not_done_after_its_turns_is_truncated():
    engine = ScriptedEngine([Turn(ids("5<eos>"))] * 3)
    played = play(engine, ScriptedPool([observed(">:")] * 3), max_turns=2)
    assert (text_of(played.tokens), played.finish) == ("5<eos>>:5<eos>", "length")


@pytest.mark.parametrize(
    ("turns", "actions", "rewards"),
    [
        (["120<|im_end|>"], [], [0.0]),
        (["5<|im_end|>", "<think>7</think>7<|im_end|>"], ["5"], [0.25, 0.0]),
    ],
)
def test_turn_cut_off_by_its_own_limit_is_no_action_and_ends_the_episode(turns, actions, rewards):
    engine = ScriptedEngine([Turn(ids(turn)) for turn in turns])
    pool = ScriptedPool([observed("no", reward=0.25), observed(done=True, reward=1.0)])
    row = {"messages": [user("Q")]}
    played = play(engine, pool, template=CHATML, prompt="<|im_start|>user\nQ<|im_end|>\n", row=row, max_turn_tokens=2)
    assert (pool.actions, played.finish, played.episode.turn_rewards.tolist()) == (actions, "length", rewards)


OPENS = CHATML.replace("assistant\\n", "assistant\\n<think>\\n")
"""A template whose generation prompt opens the thinking."""


@pytest.mark.parametrize(
    ("template", "turn", "action", "whole"),
    [
        ("", "<think>5?</think>7<eos>", "7", "<think>5?</think>7"),
        ("", "<think>5? 7!<eos>", "", "<think>5? 7!"),
        (OPENS, "5? no</think>7<|im_end|>", "7", "<think>\n5? no</think>7"),
        (OPENS, "it is 5<|im_end|>", "", "<think>\nit is 5"),
        (OPENS, "5</think>6<think>6?</think>7<|im_end|>", "6\n7", "<think>\n5</think>6<think>6?</think>7"),
    ],
)
@pytest.mark.parametrize("sees_thinking", [False, True])
def test_action_is_the_answer_and_for_an_environment_that_asks_the_whole_turn(
    template, turn, action, whole, sees_thinking
):
    pool = ScriptedPool([observed(done=True)], start=[user("Q")] if template else [])
    pool.sees_thinking = sees_thinking
    prompt, row = ("", {"messages": []}) if template else (PROMPT, None)
    one = make(ScriptedEngine([Turn(ids(turn))]), pool, template)
    asyncio.run(one.play(dataclasses.replace(episode(prompt or "x", row=row))))
    assert pool.actions == [whole if sees_thinking else action]


@pytest.mark.parametrize(
    ("max_tokens", "context", "said"),
    [
        (5, 1000, "now 5"),
        (100, 9, "now 9"),
        (100, 3, "now 3"),
    ],
)
def test_first_observation_that_leaves_no_room_is_a_final_error_that_names_the_budgets(max_tokens, context, said):
    engine, pool = ScriptedEngine([]), ScriptedPool([], start=[user("Board")])
    with pytest.raises(EpisodeError, match=said) as e:
        play(engine, pool, max_tokens=max_tokens, max_context_tokens=context)
    assert e.value.is_final and pool.num_opened == 1 and not engine.requests


@pytest.mark.parametrize("where", ["open", "reset", "step"])
def test_episode_whose_environment_fails_is_played_again_from_its_start(where):
    engine = ScriptedEngine([Turn(ids("5<eos>")), Turn(ids("7<eos>"))])
    pool = ScriptedPool([observed(">:"), observed(reward=1.0, done=True)])
    pool.failures = [where] * 2
    played = play(engine, pool)
    assert text_of(played.tokens) == "5<eos>>:7<eos>" and played.episode.turn_rewards.tolist() == [0.0, 1.0]
    assert pool.num_opened == pool.num_closed == 3
    assert len({r.request_id for r in engine.requests}) == len(engine.requests)
    assert all(r.request_id.startswith("t.0") for r in engine.requests)


def test_episode_whose_environment_keeps_failing_is_an_error_and_no_reward():
    engine, pool = ScriptedEngine([Turn(ids("5<eos>"))]), ScriptedPool([observed(">:")])
    pool.failures = ["step"] * 9
    with pytest.raises(EpisodeError, match=r"broke at step \(3 attempts\)"):
        play(engine, pool)
    assert pool.num_closed == 3


def test_template_that_refuses_is_one_error_before_anything_is_sampled():
    template = (
        "{% for m in messages %}{% if m.role == 'user' and loop.index0 %}{{ raise_exception('once') }}{% endif %}"
    )
    template += "{{ m.content }}{% endfor %}"
    engine, pool = ScriptedEngine([Turn(ids("5<eos>"))]), ScriptedPool([observed(">:")])
    with pytest.raises(EpisodeError, match="refuses the messages: once"):
        play(engine, pool, template=template, prompt="Q", row={"messages": [user("Q")]})
    assert not engine.requests and pool.num_opened == 1


async def test_cancelled_episode_ends_its_request_and_its_process():
    engine, pool = ScriptedEngine([Turn(ids("5<eos>"))]), ScriptedPool([])
    engine.hangs = True
    task = asyncio.create_task(make(engine, pool).play(episode()))
    await until(lambda: engine.requests, "a turn is sampled")
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled() and engine.cancelled == ["t.0@0.0"]
    assert pool.num_opened == pool.num_closed == 1


def test_turns_keep_the_rest_of_the_sampling():
    engine = ScriptedEngine([Turn(ids("5<eos>"))])
    one = episode()
    sampling = Sampling(max_tokens=50, temperature=0.7, top_p=0.9, top_k=4, min_tokens=40, stop_token_ids=(EOS,))
    one = dataclasses.replace(one, sampling=sampling)
    asyncio.run(make(engine, ScriptedPool([observed(done=True)]), max_turn_tokens=10).play(one))
    asked = engine.requests[0].sampling
    assert (asked.max_tokens, asked.min_tokens) == (10, 10)
    assert (asked.temperature, asked.top_p, asked.top_k, asked.stop_token_ids) == (0.7, 0.9, 4, (EOS,))
