"""A model folder without a model: a character tokenizer, a config.json and an empty safetensors file."""

import json
import pathlib
from typing import Any

from launch.startup.warmup import write_character_tokenizer

VOCAB_SIZE = 128
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "eos_token_id": 97,
}

CHAT_TEMPLATE = """\
{% if messages|length > 1 %}
    {# blocks without dashes: trim_blocks and lstrip_blocks decide what is left #}
    {% set many = true %}
several
{% endif %}
{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if message.role == 'user' %}{% set ns.last = index %}{% break %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
        {{- '<|im_start|>assistant\\n' + content + ('<|im_end|>\\n' if loop.index0 < ns.last else eos_token) }}
    {%- elif message.role not in ('system', 'user') %}
        {{- raise_exception('unknown role ' + message.role) }}
    {%- endif %}
{%- endfor %}
{%- if tools is not none %}{{ tools | tojson(indent=4) }}{% endif %}
{{- {'roles': messages | map(attribute='role') | list, 'text': 'ä<b>'} | tojson(indent=2) }}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
"""What the templates of chat models use: namespaces, loop controls, slices, string methods, tojson, raise."""


def make_model_folder(folder: pathlib.Path, *, chat_template: str = "", **config: Any) -> pathlib.Path:
    write_character_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    (folder / "model.safetensors").write_bytes(b"")
    if chat_template:
        (folder / "chat_template.jinja").write_text(chat_template)
    return folder


def swap_tokens(folder: pathlib.Path, first: int) -> tuple[str, str]:
    """Exchanges the ids `first` and `first` + 1 of a folder's tokenizer; returns the two tokens as they were."""
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocab = tokenizer["model"]["vocab"]
    one, other = sorted(vocab, key=vocab.get)[first : first + 2]
    vocab[one], vocab[other] = vocab[other], vocab[one]
    file.write_text(json.dumps(tokenizer))
    return one, other
