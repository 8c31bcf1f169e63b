"""The model folder's tokenizer, without torch: `tokenizers` for the text, `bridge.chat_template` for conversations."""

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tokenizers
from blake3 import blake3
from jaxtyping import Int32

from bridge.chat_template import ChatTemplate, Message, read_chat_template


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """Text to token ids, as the Hugging Face folder says."""

    folder: pathlib.Path
    backend: tokenizers.Tokenizer
    chat: ChatTemplate
    stop_token_ids: tuple[int, ...]
    """End-of-sequence tokens of generation_config.json, config.json and tokenizer_config.json together."""
    fingerprint: str
    """Hash of tokenizer.json: what the learner and an actor must agree on."""

    def encode(self, text: str) -> Int32[np.ndarray, " T"]:
        """Token ids of a text, with nothing added."""
        return np.asarray(self.backend.encode(text, add_special_tokens=False).ids, np.int32)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids, special tokens left out."""
        return self.backend.decode(list(map(int, tokens)), skip_special_tokens=True)

    def decode_all(self, tokens: Sequence[int]) -> str:
        """The text of token ids, special tokens too: what the model saw and wrote."""
        return self.backend.decode(list(map(int, tokens)), skip_special_tokens=False)

    def num_tokens(self, texts: Sequence[str]) -> list[int]:
        """How many tokens each text has; on all cores, in a fraction of the time of as many `encode`."""
        return [len(e.ids) for e in self.backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    @property
    def chat_template(self) -> str:
        """Its Jinja text; empty when the folder has none."""
        return self.chat.source

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """The texts of bos_token, eos_token, pad_token and unk_token, where the folder names them."""
        return self.chat.special_tokens

    def render_chat(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """Messages in the model's chat format, with the generation prompt up to where the assistant begins to speak.

        Raises:
          ValueError: the folder has no chat template, or the template refuses the messages.
        """
        return self.chat.render(messages, add_generation_prompt=add_generation_prompt)


def load_tokenizer(folder: str | pathlib.Path, *, vocab_size: int) -> Tokenizer:
    """Reads a model folder's tokenizer and checks it against the model.

    Raises:
      ValueError: tokenizer.json is missing or unreadable, or it has ids that the model has no embedding for.
    """
    folder = pathlib.Path(folder)
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ValueError(
            f"{folder} has no tokenizer.json; save the tokenizer in its fast format "
            "(tokenizer.save_pretrained of a fast tokenizer writes it)"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as e:  # the Rust library raises plain Exception
        raise ValueError(f"{file} is no tokenizer: {e}") from e
    largest = max(backend.get_vocab(with_added_tokens=True).values())
    if largest >= vocab_size:
        raise ValueError(
            f"the tokenizer of {folder} does not match its model: it has token id {largest}, "
            f"the model's vocab_size is {vocab_size}"
        )
    chat = read_chat_template(folder)
    special = chat.special_tokens
    stops = set()
    for source in ("generation_config.json", "config.json"):
        ids = _read_json(folder / source).get("eos_token_id")
        stops.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
    if "eos_token" in special:
        eos = backend.token_to_id(special["eos_token"])
        if eos is None:
            raise ValueError(
                f"{folder}: tokenizer_config.json names eos_token {special['eos_token']!r}, "
                "which tokenizer.json does not have"
            )
        stops.add(eos)
    if not stops:
        raise ValueError(f"{folder} names no end-of-sequence token in config.json or tokenizer_config.json")
    if max(stops) >= vocab_size:
        raise ValueError(
            f"the tokenizer of {folder} does not match its model: end-of-sequence id {max(stops)}, "
            f"the model's vocab_size is {vocab_size}"
        )
    return Tokenizer(
        folder=folder,
        backend=backend,
        chat=chat,
        stop_token_ids=tuple(sorted(stops)),
        fingerprint=blake3(file.read_bytes()).hexdigest(),
    )


def _read_json(file: pathlib.Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as e:
        raise ValueError(f"{file} is not JSON: {e}") from e
