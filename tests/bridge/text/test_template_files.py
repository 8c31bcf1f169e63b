import json

import pytest

from bridge.text.chat_template import TemplateSettings, read_chat_template
from bridge.text.template_files import named_template_files
from learner.data.tokenizer import load_tokenizer
from learner.publish.run_card import ENGINE_FILES
from tests.bridge.text import published
from tests.support.lazy import transformers

ASKED = [{"role": "user", "content": "q"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


def saying(name):
    """A template that says which it is."""
    return f"{name}:{{% for m in messages %}}{{{{ m.content }}}}{{% endfor %}}"


def put(folder, file, template):
    path = folder / file
    path.parent.mkdir(exist_ok=True)
    if file.endswith(".jinja"):
        path.write_text(template)
        return
    raw = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(raw | {"chat_template": template}))


def in_folder(tmp_path, **files):
    folder = published.make_folder(tmp_path / "m")
    for file, template in files.items():
        put(folder, file.replace("__", "/").replace("_dot_", "."), template)
    return folder


LISTED = [{"name": "default", "template": saying("default")}, {"name": "tool_use", "template": saying("tool_use")}]
FILES = {
    "tokenizer_config": ({"tokenizer_config_dot_json": saying("a")}, "a"),
    "jinja": ({"chat_template_dot_jinja": saying("a")}, "a"),
    "both": ({"chat_template_dot_jinja": saying("a"), "tokenizer_config_dot_json": saying("b")}, "a"),
    "list": ({"tokenizer_config_dot_json": LISTED}, "default"),
    "folder": (
        {
            "chat_template_dot_jinja": saying("default"),
            "additional_chat_templates__tool_use_dot_jinja": saying("tool_use"),
        },
        "default",
    ),
}


@pytest.mark.parametrize("case", FILES)
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_template_is_found_where_transformers_finds_it(tmp_path, case, tools):
    files, name = FILES[case]
    folder = in_folder(tmp_path, **files)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    wanted = theirs.apply_chat_template(ASKED, tools=tools, tokenize=False, add_generation_prompt=True)
    found = read_chat_template(folder)
    assert found.render(ASKED, tools=tools) == wanted
    assert wanted == f"{'tool_use' if tools and name == 'default' else name}:q"


@pytest.mark.parametrize("empty", ["", " \n"])
def test_empty_file_hides_no_template(tmp_path, empty):
    folder = in_folder(tmp_path, chat_template_dot_jinja=empty, tokenizer_config_dot_json=saying("a"))
    assert read_chat_template(folder).render(ASKED) == "a:q"


@pytest.mark.parametrize(
    ("file", "template"),
    [
        ("chat_template.json", saying("a")),  # of a processor: Mistral Small 3.1
        ("processor_config.json", saying("a")),
        ("chat_template.json", [{"name": "default", "template": saying("a")}]),
        ("tokenizer_config.json", {"default": saying("a")}),
        ("tokenizer_config.json", [{"name": "rag", "template": saying("a")}]),  # one alone is the one
        ("additional_chat_templates/rag.jinja", saying("a")),
    ],
)
def test_template_that_transformers_tokenizers_pass_over_is_read(tmp_path, file, template):
    folder = published.make_folder(tmp_path / "m")
    put(folder, file, template)
    assert load_tokenizer(folder, vocab_size=1024).render_chat(ASKED) == "a:q"


def test_templates_without_a_default_are_chosen_by_name_and_never_passed_over(tmp_path):
    named = [{"name": "rag", "template": saying("rag")}, {"name": "tool_use", "template": saying("tool_use")}]
    folder = in_folder(tmp_path, tokenizer_config_dot_json=named)
    found = read_chat_template(folder)
    assert found.exists and not found.source
    with pytest.raises(ValueError, match=r"has the chat templates rag, tool_use but none .*set prompts.template_name"):
        found.render(ASKED)
    assert found.render(ASKED, tools=TOOLS) == "tool_use:q"
    rag = read_chat_template(folder, TemplateSettings(name="rag"))
    assert rag.render(ASKED) == "rag:q" == rag.render(ASKED, tools=TOOLS)
    with pytest.raises(ValueError, match=r"prompts.template_name: .* has no chat template 'rog'; it has rag, tool_use"):
        read_chat_template(folder, TemplateSettings(name="rog"))
    with pytest.raises(ValueError, match="it has none"):
        read_chat_template(published.make_folder(tmp_path / "none"), TemplateSettings(name="rag"))


@pytest.mark.parametrize("given", [7, [{"name": "a"}], ["a"], {"a": 1}])
def test_template_of_another_type_is_refused_by_its_file(tmp_path, given):
    folder = published.make_folder(tmp_path / "m")
    put(folder, "chat_template.json", given)
    with pytest.raises(ValueError, match=r"chat_template.json: chat_template must be a text or a list"):
        read_chat_template(folder)


def test_templates_are_the_same_where_a_models_files_are_sent_without_folders(tmp_path):
    folder = in_folder(
        tmp_path,
        chat_template_dot_jinja=saying("default"),
        additional_chat_templates__tool_use_dot_jinja=saying("tool_use"),
    )
    sent = tmp_path / "sent"
    sent.mkdir()
    files = {name: folder / name for name in ENGINE_FILES} | named_template_files(folder)
    for name, path in files.items():
        if path.is_file():
            (sent / name).write_bytes(path.read_bytes())
    there, here = read_chat_template(sent), read_chat_template(folder)
    assert (there.source, there.named) == (here.source, here.named)
    assert there.render(ASKED, tools=TOOLS) == "tool_use:q"


@pytest.mark.heavy
def test_special_tokens_are_all_that_transformers_hands_to_a_template(tmp_path):
    folder = published.make_folder(tmp_path / "m", unk_token="<pad>", extra_special_tokens={"image_token": "<think>"})
    names = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "image_token")
    (folder / "chat_template.jinja").write_text("|".join(f"{{{{ {name} }}}}" for name in names))
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    wanted = theirs.apply_chat_template(ASKED, tokenize=False)
    assert read_chat_template(folder).render(ASKED) == wanted == "<s>|</s>|<pad>|<pad>||<think>"


def test_special_tokens_of_an_older_folder_are_read(tmp_path):
    folder = published.make_folder(tmp_path / "m")
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "</s>"}, "bos_token": "<s>"}))
    assert load_tokenizer(folder, vocab_size=1024).chat.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
