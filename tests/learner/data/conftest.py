import pytest

from learner.data.tokenizer import load_tokenizer
from tests.learner.model_folder import VOCAB_SIZE, make_model_folder


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    return load_tokenizer(make_model_folder(tmp_path_factory.mktemp("model") / "m"), vocab_size=VOCAB_SIZE)


@pytest.fixture(scope="session")
def chat_tokenizer(tmp_path_factory):
    template = (
        "{% for m in messages %}{% if m.role == 'narrator' %}{{ raise_exception('no narrator') }}{% endif %}"
        "[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[go]{% endif %}"
    )
    folder = make_model_folder(tmp_path_factory.mktemp("model") / "m", chat_template=template)
    return load_tokenizer(folder, vocab_size=VOCAB_SIZE)
