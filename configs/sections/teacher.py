"""Config fields of on-policy distillation: the part of `loss` that names its teachers."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Literal, get_args

from configs.sections.base import CheckedSection, Count, LocalPath, NotNegative, check_api_url, expand_home

Divergence = Literal["sampled", "reverse_kl", "forward_kl"]
"""Objectives of distillation; see `TeacherFields.teacher_divergence`."""
MAX_TEACHERS = 127
"""Most teachers of a run; a packed token's teacher is an int8."""
TEACHER_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Teacher:
    """Teacher of on-policy distillation that rows or problem sources name."""

    path: LocalPath = ""
    """Hugging Face folder of the teacher's model, which the learner loads."""
    url: str = ""
    """Base URL of a vLLM server with the teacher, instead of path."""

    def __post_init__(self) -> None:
        expand_home(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TeacherFields(CheckedSection):
    """Fields of `loss` for on-policy distillation."""

    teacher_coef: NotNegative = 0.0
    """Coefficient of on-policy distillation. 0: no teacher."""
    teacher_divergence: Divergence = "sampled"
    """Objective of distillation at every sampled token of a row with a teacher. `sampled`: the token's advantage gets
    coef x (log pi_teacher - log pi), whose expectation is the reverse KL. `reverse_kl`, `forward_kl`: coef x KL(pi,
    pi_teacher) or coef x KL(pi_teacher, pi) over the teacher's teacher_top_k likeliest tokens and the rest as one is
    added to the token's loss. They also teach tokens that the student does not sample, and need a teacher with a
    folder."""
    teacher_top_k: Count = 64
    """Tokens of the teacher that reverse_kl and forward_kl compare at each token, at most the student's vocabulary.
    Each takes 16 bytes of device memory per slot of a micro-batch, and with rounds.epochs > 1 also 8 bytes of the
    learner's host memory until the update ends."""
    teacher_path: LocalPath = ""
    """Hugging Face folder of the teacher of rows that name none. It may have another architecture, but must have the
    student's tokenizer. Empty: teacher of teacher_url."""
    teacher_url: str = ""
    """Base URL of a vLLM server with the teacher of rows that name none, for example http://HOST:8000/v1. Each actor
    asks it for logprobs of sampled tokens. Empty, like teacher_path: rows that name no teacher are not distilled."""
    teachers: dict[str, Teacher] = dataclasses.field(default_factory=dict[str, Teacher])
    """Teachers by name, for the rows that name one: prompts.mixture.NAME.teacher, or the column prompts.teacher_field.
    Empty: every row has the teacher of teacher_path or teacher_url."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.teachers and not self.teacher_coef:
            raise ValueError("loss.teachers has no effect without loss.teacher_coef > 0; set that or leave it out")
        if self.teacher_divergence not in (kinds := get_args(Divergence)):
            raise ValueError(
                f"loss.teacher_divergence: expected one of {', '.join(kinds)}, got {self.teacher_divergence!r}"
            )
        check_places(path=self.teacher_path, url=self.teacher_url, teachers=self.teachers)
        if self.teacher_coef and not self.teacher_names:
            raise ValueError(
                f"loss.teacher_coef={self.teacher_coef} requires a teacher; set loss.teacher_path, loss.teacher_url or "
                "loss.teachers"
            )
        if self.compares_distributions and self.teacher_urls:
            field = next(iter(self.teacher_urls.values()))[0]
            raise ValueError(
                f"loss.teacher_divergence={self.teacher_divergence} needs the teacher's distribution, but a server "
                f"gives only logprobs of sampled tokens. Set a folder in place of {field}, or "
                "loss.teacher_divergence=sampled"
            )

    @property
    def compares_distributions(self) -> bool:
        """True if distillation compares distributions, and not the sampled token's logprobs."""
        return self.teacher_coef > 0 and self.teacher_divergence != "sampled"

    @property
    def teacher_folders(self) -> dict[str, tuple[str, str]]:
        """Config field and folder by name, of teachers with a folder; "" is the teacher of rows that name none."""
        return self._teachers("path")

    @property
    def teacher_urls(self) -> dict[str, tuple[str, str]]:
        """Config field and URL by name, of teachers on servers; "" is the teacher of rows that name none."""
        return self._teachers("url")

    def _teachers(self, key: Literal["path", "url"]) -> dict[str, tuple[str, str]]:
        own = {"": (f"loss.teacher_{key}", self.teacher_path if key == "path" else self.teacher_url)}
        for name in sorted(self.teachers):
            own[name] = f"loss.teachers.{name}.{key}", getattr(self.teachers[name], key)
        return {name: (field, place) for name, (field, place) in own.items() if place}

    @property
    def teacher_names(self) -> list[str]:
        """Names of all teachers in the order of their numbers, those with folders first."""
        return [*self.teacher_folders, *self.teacher_urls]

    def teacher_number(self, name: str) -> int:
        """Returns the number of a row's teacher, from 1; 0 if a row that names none has no teacher.

        Raises ValueError if `loss.teachers` has no such name.
        """
        names = self.teacher_names
        if name and name not in names:
            raise ValueError(f"loss.teachers: expected the row's teacher {name!r}, got {', '.join(names)}")
        return 1 + names.index(name) if name in names else 0


def check_places(*, path: str, url: str, teachers: Mapping[str, Teacher]) -> None:
    """Raises ValueError unless each teacher has a valid name and either a folder or a valid URL."""
    if len(teachers) + bool(path or url) > MAX_TEACHERS:
        raise ValueError(f"loss.teachers: expected at most {MAX_TEACHERS - 1}, got {len(teachers)}")
    for name in teachers:
        if not TEACHER_NAME.fullmatch(name):
            raise ValueError(f"loss.teachers: expected a name of letters, digits, _ and -, got {name!r}")
    named = {f"loss.teachers.{name}.": teacher for name, teacher in teachers.items()}
    for where, teacher in ({"loss.teacher_": Teacher(path=path, url=url)} | named).items():
        if teacher.path and teacher.url:
            raise ValueError(f"{where}path: expected none with {where}url, got {teacher.path!r}")
        if where in named and not teacher.path and not teacher.url:
            raise ValueError(f"{where}path: expected a model folder, or a server in {where}url, got neither")
        if teacher.url:
            check_api_url(f"{where}url", teacher.url)
