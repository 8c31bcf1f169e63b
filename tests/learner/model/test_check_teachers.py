"""Which teachers a student may have."""

import dataclasses
import json

import pytest

from configs import schema, sections
from learner.model.architecture import Architecture
from learner.model.check_teachers import teacher_architectures
from tests.learner.model_folder import make_model_folder, swap_tokens

CONFIG = schema.Config(preset="test")


@pytest.fixture
def student(tmp_path):
    return make_model_folder(tmp_path / "student")


def found(student, teacher, *, loss=None, **model):
    config = dataclasses.replace(
        CONFIG,
        loss=sections.LossConfig(teacher_coef=1.0, teacher_path=str(teacher), **(loss or {})),
        model=dataclasses.replace(CONFIG.model, **model),
    )
    return teacher_architectures(config, Architecture.from_hf(student), student)


def test_teacher_of_another_size_with_more_tokens_is_accepted(tmp_path, student):
    teacher = make_model_folder(tmp_path / "teacher", hidden_size=32, num_hidden_layers=3, vocab_size=160)
    file = teacher / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["model"]["vocab"]["more"] = max(tokenizer["model"]["vocab"].values()) + 1
    file.write_text(json.dumps(tokenizer, indent=3))
    [architecture] = found(student, teacher)
    assert (architecture.hidden_size, architecture.num_layers) == (32, 3)


def test_more_of_the_teachers_tokens_than_the_student_has_are_refused(tmp_path, student):
    teacher = make_model_folder(tmp_path / "teacher", vocab_size=160)
    with pytest.raises(ValueError, match=r"teacher_top_k must be at most the student's vocab_size \(128\), got 129"):
        found(student, teacher, loss=dict(teacher_divergence="reverse_kl", teacher_top_k=129))


def test_teacher_of_another_tokenizer_is_refused_with_the_first_token_that_differs(tmp_path, student):
    teacher = make_model_folder(tmp_path / "teacher")
    one, other = swap_tokens(teacher, 5)
    with pytest.raises(ValueError, match="teacher_path .*teacher: expected the tokenizer .* but 2 of") as error:
        found(student, teacher)
    assert f"id 5 is {one!r}, got {other!r}" in str(error.value)


@pytest.mark.parametrize(
    ("fields", "model", "said"),
    [
        (dict(vocab_size=127), {}, "vocab_size must be at least the student's 128, got 127"),
        (dict(max_position_embeddings=63), dict(max_tokens=64), r"must be at least model.max_tokens \(64\), got 63"),
    ],
)
def test_teacher_that_could_not_score_every_sequence_is_refused(tmp_path, student, fields, model, said):
    teacher = make_model_folder(tmp_path / "teacher", **fields)
    with pytest.raises(ValueError, match=said):
        found(student, teacher, **model)


def test_teacher_of_an_unsupported_kind_is_refused_with_its_field(tmp_path, student):
    teacher = make_model_folder(tmp_path / "teacher", quantization_config={"quant_method": "awq"})
    with pytest.raises(ValueError, match="loss.teacher_path .*teacher: .*quantization_config"):
        found(student, teacher)


def test_teacher_that_is_no_model_is_refused_with_its_field(tmp_path, student):
    with pytest.raises(ValueError, match="loss.teacher_path: .*gone"):
        found(student, tmp_path / "gone")
