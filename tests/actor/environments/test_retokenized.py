"""What would happen to a transcript that were tokenized again, as it is not: its sampled tokens would be others."""

import asyncio
from typing import Any, cast

import numpy as np
import pytest
import tokenizers

from actor.environments.environment_pool import EnvironmentPool
from actor.environments.episode import Episodes
from actor.environments.transcript import EpisodeRequest
from bridge.rollout_types import Sampling
from configs.sections.actor import EnvironmentsConfig
from configs.tasks import guess
from tests.actor.environments.chat import rendering
from tests.actor.environments.scripted import ScriptedEngine, Turn

DIGITS = "0123456789"


def merging() -> tokenizers.Tokenizer:
    """Characters, and pairs of digits as one token each: as with most models, a text has several tokenizations."""
    pairs = [a + b for a in DIGITS for b in DIGITS]
    vocab = {t: i for i, t in enumerate([*DIGITS, *"<>-:?", *pairs, "<eos>"])}
    model = tokenizers.models.BPE(vocab=vocab, merges=[(p[0], p[1]) for p in pairs])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.add_special_tokens(["<eos>"])
    return tokenizer


def differences(tokens: np.ndarray, again: np.ndarray) -> list[int]:
    """Where a transcript and its text tokenized again part, by position in the transcript."""
    size = min(tokens.size, again.size)
    return [*np.flatnonzero(tokens[:size] != again[:size]).tolist(), *range(size, tokens.size)]


@pytest.mark.heavy
def test_transcripts_of_real_episodes_are_kept_where_tokenizing_again_would_change_them():
    tokenizer = merging()
    eos = tokenizer.token_to_id("<eos>")
    assert eos is not None
    rows = guess.rows(2, {"style": "short", "min_size": 20, "max_size": 31})

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    def turn(number: int, *, by_digits: bool) -> Turn:
        """The same text, sampled as a merged token or digit by digit: a policy may do either."""
        text = f"{number:02d}"
        return Turn([*(sum((ids(d) for d in text), []) if by_digits else ids(text)), eos])

    async def play(index: int, by_digits: list[bool]):
        row = rows(index)
        low, secret = row.metadata["low"], int(row.answer)
        others = [n for n in range(low, row.metadata["high"] + 1) if n != secret][: len(by_digits) - 1]
        engine = ScriptedEngine([turn(n, by_digits=d) for n, d in zip([*others, secret], by_digits, strict=True)])
        pool = EnvironmentPool(EnvironmentsConfig())
        episodes = Episodes(
            cast(Any, engine), pool, rendering(tokenizer=tokenizer), EnvironmentsConfig(), max_context_tokens=200
        )
        prompt = np.asarray(ids(row.question), np.int32)
        episode = EpisodeRequest(
            environment="guess",
            prompt_tokens=prompt,
            row=dict(row.metadata) | {"answer": row.answer},
            sampling=Sampling(max_tokens=60, stop_token_ids=(cast(Any, eos),)),
            request_id="t.0",
            priority=0,
        )
        try:
            return row, engine, await episodes.play(episode)
        finally:
            await pool.close()

    for index, by_digits in enumerate(([False, False, False], [True, False, False], [False, True, True])):
        row, engine, played = asyncio.run(asyncio.wait_for(play(index, by_digits), 60))
        assert played.episode is not None
        assert played.episode.turn_rewards.tolist() == [0.0, 0.0, 1.0] and played.finish == "stop"
        sampled = [t for script in engine.turns for t in script.tokens]
        assert played.tokens[played.episode.sampled].tolist() == sampled
        text = tokenizer.decode(played.tokens.tolist(), skip_special_tokens=False)
        again = np.asarray(ids(text), np.int32)
        where = differences(played.tokens, again)
        if not any(by_digits):
            assert where == []  # the one tokenization that would be found again
            continue
        # It parts at the first turn that was sampled digit by digit, and everything behind it is shifted.
        starts = np.flatnonzero(np.diff(np.concatenate([[False], played.episode.sampled]).astype(int)) == 1)
        assert where[0] == starts[by_digits.index(True)]
        assert again.size == played.tokens.size - sum(by_digits)
        print(f"transcript={text!r} tokens={played.tokens.size} again={again.size} at={where[0]}")
