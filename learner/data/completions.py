"""Supervised rows: the token sequences of a response or a conversation, and which of their tokens are trained.

The tokens are those that the policy reads and samples in reinforcement learning. A response follows the prompt that
`learner.data.tokenizer.render` gives, and the token that ends a turn follows it. In a conversation each assistant
message follows the text that the chat template gives to generate it. Trained are the messages up to and with the token
that ends their turn. No token spans the boundary between trained and other text.

Templates may render a turn differently once another follows, for example without its thinking. Such a turn is trained
in a sequence of its own, which ends with it. Otherwise turns share a sequence, with the same loss.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bridge.text import text_tokens
from configs.sections import PromptsConfig
from learner.data.completeness import check_complete
from learner.data.problem import Completion, Problem, RawProblem
from learner.data.tokenizer import Tokenizer, check_embedded, messages_of, render

_STAND_IN = "Sluiceanswer"
"""Stand-in for a response in a rendered conversation: one word that no template trims or treats specially."""


class TextPiece(NamedTuple):
    """Part of a sequence's text."""

    text: str
    is_trained: bool


def render_completions(raw: RawProblem, tokenizer: Tokenizer, config: PromptsConfig) -> list[list[TextPiece]]:
    """Returns the pieces of each sequence of a supervised row: text before, a trained turn, text between, ...

    Raises ValueError as `render`, or if the template does not end a turn with an end-of-sequence token, or does not
    write an assistant message after the text that it gives to generate one.
    """
    if raw.response:
        prompt = render(raw, tokenizer, config)
        sequences = [[TextPiece(prompt, False), TextPiece(_response(raw, prompt, tokenizer, config), True)]]
    else:
        sequences = [_pieces(text, spans) for text, spans in _conversation(raw, tokenizer, config)]
    for pieces in sequences:
        check_embedded(joined(pieces), tokenizer)
    return sequences


def joined(pieces: Sequence[TextPiece]) -> str:
    """Returns a sequence's text, of which `Tokenizer.encode` gives the tokens of its pieces, one after the other."""
    return text_tokens.BREAK.join(piece.text for piece in pieces)


def tokenize_completions(raw: RawProblem, tokenizer: Tokenizer, config: PromptsConfig, *, source: str = "") -> Problem:
    """Renders and tokenizes a supervised row of source `source`; raises ValueError as `render_completions`."""
    sequences: list[Completion] = []
    for pieces in render_completions(raw, tokenizer, config):
        texts = [pieces[0].text, *(text_tokens.BREAK + piece.text for piece in pieces[1:])]
        ids = text_tokens.encode_batch(tokenizer.backend, texts)
        mask = np.repeat([piece.is_trained for piece in pieces], [len(of_piece) for of_piece in ids])
        sequences.append(Completion(np.array([i for of_piece in ids for i in of_piece], np.int32), mask))
    size = _num_shared(sequences)
    if size == 0:
        raise ValueError("the chat template begins the conversation differently when another turn follows")
    completions = tuple(Completion(s.tokens[size:], s.loss_mask[size:]) for s in sequences)
    return Problem(raw.question, sequences[0].tokens[:size], raw.task, source, completions, raw.asked)


def _response(raw: RawProblem, prompt: str, tokenizer: Tokenizer, config: PromptsConfig) -> str:
    """Returns the text of a response as the model writes it, up to and with the token that ends its turn."""
    messages, control = messages_of(raw, tokenizer, config), tokenizer.control
    end = turn_end(tokenizer, is_chat=bool(messages))
    if raw.response.lstrip().startswith(tuple(control.of_turns)):  # in the model's own format
        return control.response_as_text(raw.response) + end
    (said,) = control.as_text([{"role": "assistant", "content": raw.response}])
    if not messages or messages[-1]["role"] == "assistant":  # nothing is written before a response that goes on
        return said["content"] + end
    # Add the template's text, for example the name of a channel, but no thinking: the policy may begin without.
    stand_in = [*messages, {"role": "assistant", "content": _STAND_IN}]
    text = tokenizer.render_chat(
        stand_in, add_generation_prompt=False, tools=raw.tools, arguments=raw.template_arguments
    )
    lead, found, behind = text.removeprefix(prompt).partition(_STAND_IN)
    tail, ends, _ = behind.partition(end)
    if not (text.startswith(prompt) and found and ends) or text_tokens.is_thinking(lead):
        return said["content"] + end
    return lead + said["content"] + tail + end


def turn_end(tokenizer: Tokenizer, *, is_chat: bool) -> str:
    """Returns the token that ends a response: the chat template's behind an assistant message, or the eos_token.

    Raises ValueError if the template ends a turn with no end-of-sequence token.
    """
    if is_chat:
        found = text_tokens.answer_end(tokenizer.backend, tokenizer.chat, tokenizer.stop_token_ids)
        if found is None:
            raise ValueError(_no_end(tokenizer))
        return tokenizer.decode([found])
    return tokenizer.chat.special_tokens.get("eos_token") or tokenizer.decode(tokenizer.stop_token_ids[:1])


_Spans = list[tuple[int, int]]
"""Start and end of each trained turn in a text."""


def _conversation(raw: RawProblem, tokenizer: Tokenizer, config: PromptsConfig) -> list[tuple[str, _Spans]]:
    """Returns the text of each sequence and its trained turns."""
    messages = messages_of(raw, tokenizer, config)
    if not messages:
        raise ValueError(
            f"the row is a conversation, and no chat template is applied: {tokenizer.folder} has none, or "
            "prompts.chat_template=off"
        )
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    tools, arguments = raw.tools, raw.template_arguments
    check_complete(tokenizer.chat, messages[: turns[-1] + 1], tools=tools, arguments={**arguments})
    ends = [text for i in tokenizer.stop_token_ids if (text := tokenizer.decode([i]))]
    found: list[tuple[str, _Spans]] = []
    for i in turns:
        before = tokenizer.render_chat(messages[:i], tools=tools, arguments=arguments)
        text = tokenizer.render_chat(messages[: i + 1], add_generation_prompt=False, tools=tools, arguments=arguments)
        if not text.startswith(before):
            raise ValueError(
                f"the chat template does not write message {i + 1} (role assistant) after the text that it gives to "
                "generate it; give the text as the model writes it in a response column (sft.response_field)"
            )
        after = [place + len(end) for end in ends if (place := text.find(end, len(before))) >= 0]
        if not after:
            raise ValueError(_no_end(tokenizer))
        span = len(before), min(after)
        shared = found[-1] if found else ("", [])
        if found and before.startswith(shared[0][: shared[1][-1][1]]):
            found[-1] = text, [*shared[1], span]
        else:
            found.append((text, [span]))
    return found


def _pieces(text: str, spans: _Spans) -> list[TextPiece]:
    """Cuts a text at its trained turns; drops what follows the last one."""
    pieces: list[TextPiece] = []
    done = 0
    for start, end in spans:
        pieces += [TextPiece(text[done:start], False), TextPiece(text[start:end], True)]
        done = end
    return pieces


def _num_shared(sequences: Sequence[Completion]) -> int:
    """Returns the number of tokens with which all sequences begin, before the first trained token of any."""
    size = min(int(s.loss_mask.argmax()) for s in sequences)
    heads = np.stack([s.tokens[:size] for s in sequences])
    differs = (heads != heads[0]).any(0)
    return int(differs.argmax()) if differs.any() else size


def _no_end(tokenizer: Tokenizer) -> str:
    return (
        f"the chat template of {tokenizer.folder} ends an assistant message with no end-of-sequence token, so the "
        "model would not learn to stop; fix the template, or set prompts.chat_template=off"
    )
