"""Config section of a teacher of on-policy distillation."""

import dataclasses
import re
from collections.abc import Mapping

from configs.sections.base import LocalPath, check_api_url, expand_home

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


def check_places(*, path: str, url: str, teachers: Mapping[str, Teacher]) -> None:
    """Raises ValueError unless each teacher has a valid name and either a folder or a valid URL.

    Args:
      path: `loss.teacher_path`.
      url: `loss.teacher_url`; both may be empty.
      teachers: `loss.teachers`.
    """
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
