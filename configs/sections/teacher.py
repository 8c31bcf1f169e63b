"""Config section of a teacher of on-policy distillation."""

import dataclasses
import re

from configs.sections.base import LocalPath, expand_home

MAX_TEACHERS = 127
"""Most teachers of a run; a packed token's teacher is an int8."""
TEACHER_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Teacher:
    """Teacher of on-policy distillation that rows or problem sources name."""

    path: LocalPath = ""
    """Hugging Face folder of the teacher's model."""

    def __post_init__(self) -> None:
        expand_home(self)
