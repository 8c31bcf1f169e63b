"""Tokenizers and chat templates of the kinds that models have."""

import pathlib

import tokenizers

from actor.environments.chat_render import ChatRenderer
from actor.turn_text import turn_reader
from bridge.text.chat_template import ChatTemplate

CHARACTERS = [chr(i) for i in range(32, 127)] + ["\n"]
SPECIAL = ["<pad>", "<eos>", "<|im_start|>", "<|im_end|>", "<bos>", "<think>", "</think>"]
EOS, IM_END = (len(CHARACTERS) + SPECIAL.index(t) for t in ("<eos>", "<|im_end|>"))

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# What Qwen3's does: of turns before the last user's message the thinking is taken out.
STRIPS_THINKING = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}"
    "{% for m in messages %}{% set text = m.content %}"
    "{% if m.role == 'assistant' and loop.index0 < ns.last and '</think>' in text %}"
    "{% set text = text.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\\n' + text + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# What Mistral's and Gemma's do: roles alternate, from a user on.
ALTERNATES = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content | trim + '<eos>' }}{% endif %}{% endfor %}"
)
# One that renders the last message otherwise, so that nothing can be appended to what it made.
CLOSES_LAST = "{% for m in messages %}{{ m.content }}{% if loop.last %}{{ '<eos>' }}{% endif %}{% endfor %}"


def characters() -> tokenizers.Tokenizer:
    """One token a character, besides special ones."""
    vocab = {token: i for i, token in enumerate([*CHARACTERS, *SPECIAL])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<pad>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def rendering(template: str = "", tokenizer: tokenizers.Tokenizer | None = None) -> ChatRenderer:
    chat = ChatTemplate(folder=pathlib.Path("model"), source=template, special_tokens={"eos_token": "<eos>"})
    tokenizer = tokenizer or characters()
    marks = turn_reader(tokenizer, chat, "auto").thinking
    return ChatRenderer(tokenizer=tokenizer, chat=chat if template else None, thinking=marks)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}
