"""Checks of the teachers of on-policy distillation against the student. Imports no jax."""

import pathlib

from bridge.text.text_tokens import read_tokenizer
from configs.schema import Config
from learner.model.architecture import Architecture


def teacher_architectures(config: Config, student: Architecture, student_folder: pathlib.Path) -> list[Architecture]:
    """Returns the architectures of the run's teachers, in the order of their numbers.

    A teacher scores the student's token ids, so each id must be the same token in both. It may have more tokens. Raises
    ValueError if a folder is no model, if its tokenizer, vocabulary or context does not fit the student, or if
    loss.teacher_top_k is above the student's vocabulary.
    """
    if config.loss.compares_distributions and config.loss.teacher_top_k > student.vocab_size:
        raise ValueError(
            f"loss.teacher_top_k must be at most the student's vocab_size ({student.vocab_size}), got "
            f"{config.loss.teacher_top_k}"
        )
    found: list[Architecture] = []
    for field, path in config.loss.teacher_folders.values():
        folder = pathlib.Path(path)
        try:
            teacher = Architecture.from_hf(folder)
        except FileNotFoundError as e:
            raise ValueError(f"{field}: {e}") from e
        except ValueError as e:  # another architecture, or quantized weights
            raise ValueError(f"{field} {folder}: {e}") from e
        check_tokens(field, folder, student_folder)
        if teacher.vocab_size < student.vocab_size:
            raise ValueError(
                f"{field} {folder}: vocab_size must be at least the student's {student.vocab_size}, got "
                f"{teacher.vocab_size}; the teacher could not score every token of the student"
            )
        if teacher.max_position_embeddings < config.model.max_tokens:
            raise ValueError(
                f"{field} {folder}: max_position_embeddings must be at least model.max_tokens "
                f"({config.model.max_tokens}), got {teacher.max_position_embeddings}; lower model.max_tokens"
            )
        found.append(teacher)
    return found


def check_tokens(field: str, folder: pathlib.Path, student_folder: pathlib.Path) -> None:
    """Raises ValueError if a token of the policy has another id in the tokenizer of another model of the run."""
    own, others = (read_tokenizer(f).get_vocab(with_added_tokens=True) for f in (student_folder, folder))
    differing = [(number, text) for text, number in own.items() if others.get(text) != number]
    if differing:
        number, text = min(differing)
        got = next((repr(other) for other, n in others.items() if n == number), "no token")
        raise ValueError(
            f"{field} {folder}: expected the tokenizer of the policy ({student_folder}), but {len(differing)} of its "
            f"{len(own)} tokens differ: id {number} is {text!r}, got {got}. Choose a model with the same tokenizer"
        )
