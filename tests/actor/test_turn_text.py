"""What is read of the context before a turn: as little as shows the beginning of the assistant's message."""

from typing import Any, cast

import numpy as np
import pytest

from actor.turn_text import TurnReader
from bridge.text.thinking import KNOWN, ThinkingFormat


class Characters:
    """Stands for a tokenizer: a token is a character, and it counts those that are decoded."""

    num_decoded = 0

    def decode(self, tokens, *, skip_special_tokens):
        assert not skip_special_tokens
        self.num_decoded += len(tokens)
        return "".join(map(chr, tokens))


@pytest.mark.parametrize(
    ("context", "begun", "num_decoded"),
    [
        ("u" * 9000 + "<me>", "", 4096),
        ("u" * 9000 + "<me>Well, ", "Well, ", 4096),
        ("<me>" + "w" * 9000, "w" * 9000, 4096 + 9004),
    ],
    ids=["nothing prefilled", "prefilled", "prefilled by more than is read first"],
)
def test_long_context_is_decoded_whole_only_if_its_end_does_not_show_the_messages_beginning(
    context, begun, num_decoded
):
    characters = Characters()
    reader = TurnReader(tokenizer=cast(Any, characters), thinking=ThinkingFormat(KNOWN, header="<me>"))
    tokens = [np.array([ord(c) for c in text], np.int32) for text in (context, "yes.")]
    assert reader.read(tokens[0], tokens[1], [ord(".")]).begun == begun
    assert characters.num_decoded == num_decoded + len("yes")
