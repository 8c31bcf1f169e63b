import json

import pytest

from learner.data.tokenizer import load_tokenizer
from tests.learner.model_folder import CHAT_TEMPLATE, VOCAB_SIZE, make_model_folder
from tests.support.lazy import transformers

# The character tokenizer: the 95 printable ASCII characters from 0 on, newline, <pad>, <eos>.
NEWLINE, PAD, EOS = 95, 96, 97


@pytest.fixture
def folder(tmp_path):
    return make_model_folder(tmp_path / "model")


def load(folder, vocab_size=VOCAB_SIZE):
    return load_tokenizer(folder, vocab_size=vocab_size)


def edit(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_encode_adds_nothing_and_decode_leaves_nothing_out(folder):
    tokenizer = load(folder)
    tokens = tokenizer.encode("1 + 2\n")
    assert tokens.dtype == "int32"
    assert tokens.tolist() == [ord(c) - 32 for c in "1 + 2"] + [NEWLINE]
    assert tokenizer.decode([*tokens, EOS, PAD]) == "1 + 2\n<eos><pad>"
    assert tokenizer.encode("<eos>").tolist() == [EOS]
    assert tokenizer.encode("").shape == (0,)


def test_load_stop_ids_are_those_of_all_files_together(folder):
    edit(folder / "config.json", eos_token_id=3)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 5, 3]}))
    assert load(folder).stop_token_ids == (3, 5, 7, EOS)


def test_load_special_token_written_as_an_object(folder):
    edit(folder / "tokenizer_config.json", eos_token={"content": "<eos>", "lstrip": False}, bos_token=None)
    assert load(folder).chat.special_tokens == {"pad_token": "<pad>", "eos_token": "<eos>"}


def test_fingerprint_changes_with_tokenizer_json_alone(folder, tmp_path):
    first = load(folder).fingerprint
    edit(folder / "config.json", eos_token_id=1)
    assert load(folder).fingerprint == first == load(make_model_folder(tmp_path / "b")).fingerprint
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert load(folder).fingerprint != first


def test_load_ids_beyond_the_models_vocabulary_are_refused(folder):
    load(folder, vocab_size=98)
    with pytest.raises(ValueError, match=r"does not match its model: it has token id 97, .* vocab_size is 97"):
        load(folder, vocab_size=97)


def test_load_added_tokens_beyond_the_models_vocabulary_are_kept_apart(folder):
    """Gemma 3 1B names a token of images, CodeLlama a padding token, that the model has no embedding for."""
    raw = json.loads((folder / "tokenizer.json").read_text())
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    raw["added_tokens"] += [{"id": 98, "content": "<image>", "special": True, **flags}]
    raw["added_tokens"] += [{"id": 99, "content": "<extra>", "special": False, **flags}]
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    tokenizer = load(folder, vocab_size=98)
    assert tokenizer.beyond == {"<image>": 98, "<extra>": 99} and tokenizer.stop_token_ids == (EOS,)
    assert load(folder, vocab_size=100).beyond == {}


NOTED = {
    "turn end": (dict(), "<|turn|>", "ends a turn with '<|turn|>' (98), which is none of the end-of-sequence tokens"),
    "eos": (
        dict(eos_token_id=96),
        "<eos>",
        "disagree on the end of a sequence: config.json [96]; tokenizer_config.json [97]",
    ),
    "bos": (
        dict(bos_token_id=3),
        "<eos>",
        "disagree on the BOS token: config.json 3, tokenizer_config.json '<pad>' (96)",
    ),
}


@pytest.mark.parametrize("case", NOTED)
def test_load_notes_what_the_files_disagree_on(folder, case):
    config, end, said = NOTED[case]
    raw = json.loads((folder / "tokenizer.json").read_text())
    raw["added_tokens"] += [raw["added_tokens"][-1] | {"id": 98, "content": "<|turn|>"}]
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    edit(folder / "config.json", **config)
    edit(folder / "tokenizer_config.json", bos_token="<pad>" if case == "bos" else None)
    (folder / "chat_template.jinja").write_text(f"{{% for m in messages %}}{{{{ m.content }}}}{end}{{% endfor %}}")
    tokenizer = load(folder)
    (note,) = tokenizer.notes
    assert note.startswith("warning: ") and said in note
    assert tokenizer.stop_token_ids == {"turn end": (97, 98), "eos": (96, 97), "bos": (97,)}[case]


def test_load_notes_nothing_of_files_that_agree(tmp_path):
    assert load(make_model_folder(tmp_path / "model", chat_template=CHAT_TEMPLATE, bos_token_id=None)).notes == ()


def test_load_stop_id_beyond_the_models_vocabulary_is_refused(folder):
    edit(folder / "config.json", eos_token_id=500)
    with pytest.raises(ValueError, match="end-of-sequence id 500"):
        load(folder)


def test_load_without_tokenizer_json_says_how_to_get_one(folder):
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="has no tokenizer.json; save the tokenizer"):
        load(folder)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "config.json"])
def test_load_torn_file_is_refused_by_name(folder, name):
    (folder / name).write_text("{")
    with pytest.raises(ValueError, match=name):
        load(folder)


def test_load_without_any_end_of_sequence_token_is_refused(folder):
    (folder / "tokenizer_config.json").unlink()
    edit(folder / "config.json", eos_token_id=None)
    with pytest.raises(ValueError, match="names no end-of-sequence token"):
        load(folder)


def test_load_eos_token_the_tokenizer_does_not_have_is_refused(folder):
    edit(folder / "tokenizer_config.json", eos_token="<|im_end|>")
    with pytest.raises(ValueError, match="names eos_token '<|im_end|>'"):
        load(folder)


CONVERSATIONS = {
    "question": [("user", "1 + 1?")],
    "system": [("system", "Be brief."), ("user", "1 + 1?")],
    "turns": [("system", "S"), ("user", "a"), ("assistant", "<think>x</think>\n\nb"), ("user", "c & <d>")],
    "prefilled": [("user", "a"), ("assistant", "b")],
}


@pytest.mark.heavy
@pytest.mark.parametrize("source", ["jinja file", "tokenizer_config", "named list"])
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_render_chat_is_what_transformers_renders(tmp_path, name, source):
    folder = make_model_folder(tmp_path / "model", chat_template=CHAT_TEMPLATE if source == "jinja file" else "")
    if source == "tokenizer_config":
        edit(folder / "tokenizer_config.json", chat_template=CHAT_TEMPLATE)
    if source == "named list":
        both = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": CHAT_TEMPLATE}]
        edit(folder / "tokenizer_config.json", chat_template=both)
    messages = [{"role": role, "content": content} for role, content in CONVERSATIONS[name]]
    reference = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), eos_token="<eos>")
    want = reference.apply_chat_template(
        messages, chat_template=CHAT_TEMPLATE, add_generation_prompt=True, tokenize=False
    )
    assert load(folder).render_chat(messages) == want
    assert isinstance(want, str) and want.endswith("<|im_start|>assistant\n")


def test_render_chat_that_the_template_refuses_is_a_value_error(tmp_path):
    folder = make_model_folder(tmp_path / "model", chat_template=CHAT_TEMPLATE)
    with pytest.raises(ValueError, match="refuses the messages: unknown role tool"):
        load(folder).render_chat([{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}])


def test_render_chat_without_a_template_is_refused(folder):
    with pytest.raises(ValueError, match="has no chat template; set prompts.chat_template=off"):
        load(folder).render_chat([{"role": "user", "content": "a"}])
