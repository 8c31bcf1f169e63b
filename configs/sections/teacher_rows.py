"""Check that the rows of a run and the teachers of its loss belong together."""

from configs.sections.loss import LossConfig
from configs.sections.prompts import PromptsConfig


def check_teachers(loss: LossConfig, prompts: PromptsConfig, *, num_helpers: int, temperature: float) -> None:
    """Raises ValueError if problem sources name unknown teachers, a teacher has no rows, or rows lack a teacher."""
    named = {name: source.teacher for name, source in prompts.sources.items()}
    for source, name in named.items():
        if name and name not in loss.teachers:
            raise ValueError(
                f"prompts.mixture.{source}.teacher: expected one of loss.teachers "
                f"({', '.join(loss.teachers) or 'none'}), got {name!r}"
            )
    if prompts.teacher_field and not loss.teachers:
        raise ValueError(f"prompts.teacher_field={prompts.teacher_field} requires loss.teachers")
    if unused := () if prompts.teacher_field else sorted(loss.teachers.keys() - set(named.values())):
        raise ValueError(
            f"loss.teachers.{unused[0]} teaches no row; name it in prompts.mixture.NAME.teacher or in a column "
            "(prompts.teacher_field), or leave it out"
        )
    if "" in loss.teacher_names and not prompts.teacher_field and all(named.values()):
        field = "teacher_path" if loss.teacher_path else "teacher_url"
        raise ValueError(f"loss.{field} teaches no row, because every source names another teacher; leave it out")
    if loss.advantage == "none" and "" not in loss.teacher_names and not (prompts.teacher_field or all(named.values())):
        lacking = ", ".join(source for source, name in named.items() if not name)
        raise ValueError(
            "loss.advantage=none requires a teacher for every row; set loss.teacher_path or loss.teacher_url"
            + (f", or the teacher of each source of prompts.mixture (none: {lacking})" if lacking else "")
        )
    if temperature != 1 and (urls := list(loss.teacher_urls.values())):
        raise ValueError(
            f"{urls[0][0]} requires sampling.temperature=1, got {temperature:g}: a server's logprobs have no "
            "temperature. Set it, or give the teacher's folder instead"
        )
    if num_helpers and loss.teacher_coef:
        raise ValueError(
            f"helpers.num_engines={num_helpers} requires loss.teacher_coef=0: a helper's devices hold no teacher"
        )
