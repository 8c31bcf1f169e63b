import asyncio
import json
import os
from typing import Any, cast

import numpy as np
import pytest

from actor.engine_protocol import AbortedError
from actor.environments.environment_pool import EnvironmentPool
from actor.environments.episode import RETRIES, Episodes
from actor.environments.protocol import EpisodeError
from actor.environments.token_endpoint import Conversation
from actor.environments.transcript import EpisodeRequest, EpisodeTurns
from bridge.rollout_types import Sampling
from configs.sections.actor import EnvironmentsConfig
from tests.actor.environments.chat import CHATML, IM_END, characters, rendering
from tests.actor.environments.scripted import ScriptedEngine, Turn, observed
from tests.actor.fakes import until

MODULE = "tests.actor.environments.playing_environments"
PLAYING = f"{MODULE}:Playing"
PROMPT = [7, 8]
STOP = 9
INFOS: list[dict[str, Any]] = []
"""What the environments of the last `play` said to people."""


def play(
    engine: Any,
    *,
    how: str = "",
    turns: int = 2,
    max_tokens: int = 50,
    prompt: list[int] | None = None,
    retries: int = RETRIES,
    **config,
):
    async def body() -> Any:
        settings = EnvironmentsConfig(**config)
        pool = EnvironmentPool(settings, own=(PLAYING,))
        episodes = Episodes(cast(Any, engine), pool, rendering(), settings, max_context_tokens=1000, retries=retries)
        monkeypatch = pytest.MonkeyPatch()
        INFOS.clear()
        end = Conversation.end
        monkeypatch.setattr(Conversation, "end", lambda self, step: (INFOS.append(step.info), end(self, step))[1])
        episode = EpisodeRequest(
            environment=PLAYING,
            prompt_tokens=np.asarray(prompt or PROMPT, np.int32),
            row={"prompt": PROMPT, "turns": turns, "how": how},
            sampling=Sampling(max_tokens=max_tokens, stop_token_ids=(STOP,)),
            request_id="t.0",
            priority=5,
        )
        try:
            return await episodes.play(episode)
        finally:
            monkeypatch.undo()
            await episodes.close()
            await pool.close()

    return asyncio.run(asyncio.wait_for(body(), 120))


def test_episode_told_by_requests_is_what_was_sampled_and_observed():
    engine = ScriptedEngine([Turn([3, STOP], step=1), Turn([4, STOP], step=2)])
    played = play(engine)
    assert played.tokens.tolist() == [0, 3, STOP, 1, 4, STOP]
    assert played.episode.sampled.tolist() == [False, True, True, False, True, True]
    assert [v.step for v in played.token_versions] == [1, 1, 1, 1, 2, 2]
    assert played.episode.turn_rewards.tolist() == [0.0, 0.5] and played.finish == "stop"
    assert [r.tokens.tolist() for r in engine.requests] == [[7, 8, 0], [7, 8, 0, 3, STOP, 1]]


def test_history_that_was_rendered_again_is_an_error_and_no_reward():
    engine = ScriptedEngine([Turn([3, STOP])] * 3)
    with pytest.raises(EpisodeError, match="first difference at token 3") as e:
        play(engine, how="rewrites")
    assert e.value.is_final and len(engine.requests) == 1


def test_another_prompt_than_the_rows_is_an_error():
    engine = ScriptedEngine([Turn([3, STOP])])
    with pytest.raises(EpisodeError, match="first difference at token 1"):
        play(engine, prompt=[7, 6])
    assert not engine.requests


@pytest.mark.parametrize(("max_tokens", "max_turns"), [(7, 8), (50, 2)])
def test_budget_that_is_used_up_truncates_the_episode(max_tokens, max_turns):
    engine = ScriptedEngine([Turn([3, STOP]), Turn([4, STOP]), Turn([5, STOP])])
    played = play(engine, turns=3, max_tokens=max_tokens, max_turns=max_turns)
    assert played.tokens.tolist() == [0, 3, STOP, 1, 4, STOP] and played.finish == "length"
    assert INFOS[0]["answers"] == ["stop", "stop", 400]


@pytest.mark.parametrize(
    ("max_tokens", "answers", "rewards"),
    [(4, [400], [0.0]), (7, ["stop", 400], [0.5, 0.0]), (8, ["stop"] * 2, [0, 0.5])],
)
def test_turn_that_uses_up_the_budget_and_does_not_end_is_no_action(max_tokens, answers, rewards):
    engine = ScriptedEngine([Turn([3, 3, 3, STOP] if max_tokens == 4 else [3, STOP]), Turn([4, 4, 4, STOP])])
    played = play(engine, max_tokens=max_tokens)
    assert INFOS[0]["answers"] == answers and played.tokens.size == max_tokens
    assert played.episode.turn_rewards.tolist() == rewards
    assert played.finish == ("length" if 400 in answers else "stop")


@pytest.mark.parametrize(("how", "statuses"), [("wrong token", [401]), ("wrong body", [400, 400, 400])])
def test_request_that_is_none_is_refused_and_changes_nothing(how, statuses):
    played = play(ScriptedEngine([Turn([3, STOP])]), how=how, turns=1)
    assert INFOS[0]["answers"] == ["stop", *statuses]
    assert played.tokens.tolist() == [0, 3, STOP]


def test_environment_that_asks_for_no_turn_is_an_error():
    with pytest.raises(EpisodeError, match="requested no turn"):
        play(ScriptedEngine([]), turns=0, retries=0)


def test_what_the_engine_raises_is_raised_to_whoever_plays():
    class Aborting(ScriptedEngine):
        async def sample(self, *args, **kwargs):
            raise AbortedError("t.0")

    with pytest.raises(AbortedError):
        play(Aborting([]))


class HangingAt(ScriptedEngine):
    """Never ends a turn of that number."""

    def __init__(self, turn: int) -> None:
        super().__init__([Turn([3, STOP])] * (turn + 1))
        self._turn = turn

    async def sample(self, *args, request_id, **kwargs):
        self.hangs = request_id.endswith(f".{self._turn}")
        return await super().sample(*args, request_id=request_id, **kwargs)


@pytest.mark.heavy
def test_environment_that_plays_for_longer_than_an_episode_may_last_is_an_error():
    engine = HangingAt(0)
    with pytest.raises(EpisodeError, match=r"no answer to act after 0.5 s \(1 attempts\)"):
        play(engine, turns=1, retries=0, episode_timeout_s=0.5)
    assert engine.cancelled == ["t.0@0.0"]


@pytest.mark.heavy
def test_environment_that_breaks_off_a_turn_is_an_error_and_played_again():
    engine = HangingAt(1)
    with pytest.raises(EpisodeError, match="abandoned a turn .* .2 attempts"):
        play(engine, how="impatient", turns=1, retries=1)
    assert engine.cancelled == ["t.0@0.1", "t.0@1.1"]


async def test_environment_that_ends_while_it_asks_for_a_turn_is_an_error():
    engine = HangingAt(0)
    episode = EpisodeRequest(
        environment=PLAYING,
        prompt_tokens=np.asarray(PROMPT, np.int32),
        row={},
        sampling=Sampling(max_tokens=9),
        request_id="t.0",
        priority=0,
    )
    turns = EpisodeTurns(cast(Any, engine), episode, request_id="t.0@0", budget_tokens=9, max_turn_tokens=0)
    conversation = Conversation(turns, max_turns=8)
    asking = asyncio.create_task(conversation.go_on([*PROMPT, 0], []))
    await until(lambda: bool(engine.requests), "it asks")
    with pytest.raises(EpisodeError, match="abandoned a turn"):
        conversation.end(observed(done=True))
    asking.cancel()
    await asyncio.wait([asking])


@pytest.mark.integration
@pytest.mark.skipif("SLUICE_VERIFIERS_PYTHON" not in os.environ, reason="names no interpreter that has verifiers 0.4")
async def test_verifiers_task_is_played_by_the_library_token_in_and_token_out(tmp_path):
    """The real library, in a virtual environment of its own; what it renders must be what we have as tokens."""
    tokenizer = characters()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": CHATML}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    engine = ScriptedEngine([Turn(ids("5<|im_end|>")), Turn(ids("8<|im_end|>")), Turn(ids("7<|im_end|>"))])

    config = EnvironmentsConfig(python=os.environ["SLUICE_VERIFIERS_PYTHON"], max_memory_gib=16)
    pool = EnvironmentPool(config)
    episodes = Episodes(cast(Any, engine), pool, rendering(CHATML), config, max_context_tokens=1000, retries=0)
    row = {"task": f"{MODULE}:verifiers_game", "model_folder": str(tmp_path), "question": "Guess.", "answer": "7"}
    episode = EpisodeRequest(
        environment="verifiers",
        prompt_tokens=np.asarray(ids("<|im_start|>user\nGuess.<|im_end|>\n"), np.int32),
        row=row,
        sampling=Sampling(max_tokens=300, stop_token_ids=(IM_END,)),
        request_id="t.0",
        priority=0,
    )
    try:
        played: Any = await episodes.play(episode)
    finally:
        await episodes.close()
        await pool.close()
    start, end = "<|im_start|>assistant\n", "<|im_end|>\n"
    said = [f"<|im_start|>user\n{word}{end}{start}" for word in ("higher", "lower")]
    text = tokenizer.decode(played.tokens.tolist(), skip_special_tokens=False)
    assert text == f"{start}5{end}{said[0]}8{end}{said[1]}7<|im_end|>"
    assert tokenizer.decode(played.tokens[played.episode.sampled].tolist()) == "587"
    assert played.episode.turn_rewards.tolist() == [0.0, 0.0, 1.0] and played.finish == "stop"
