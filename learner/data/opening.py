"""Opens the sources of a run's prompts: what each trains on, what is held out of it, and what was set aside.

No grain and no jax in here: `launch.preflight` looks at the prompts before anything starts.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from configs.schema import Config
from learner.data.files import open_eval_rows, open_file, questions
from learner.data.procedural import open_procedural
from learner.data.setting import Opened, Setting
from learner.data.shares import in_parts
from learner.data.sources.rows import Rows
from learner.data.tokenizer import Tokenizer

SetAside = Mapping[str, Mapping[int, str]]
"""By source, reasons by row number: rows whose own answer does not pass (`learner.data.gold`)."""


def open_sources(
    config: Config, tokenizer: Tokenizer, *, set_aside: SetAside | None = None, evaluated: Collection[str] = ()
) -> list[Opened]:
    """All sources of the config, in the order of their names; logs how many rows of each are kept.

    `evaluation.num_problems` are held out of them in proportion to their weights; what one source evaluates no other
    trains on, nor what an evaluation set asks.

    Args:
      config: the run's.
      tokenizer: the model's.
      set_aside: rows whose own answer does not pass.
      evaluated: questions of evaluation sets (`learner.data.sets.questions_of`).

    Raises:
      ValueError: a source is unusable, or leaves nothing to train on or to evaluate; or `prompts.num_epochs` is too few
        for the run.
    """
    sources = config.prompts.sources
    setting = Setting(config, tokenizer)
    of_eval: dict[str, Rows] = {}
    kept_out = set(evaluated)
    for name, source in sources.items():
        if (rows := open_eval_rows(source, setting.form(source))) is not None:
            of_eval[name] = rows
            kept_out |= questions(rows, setting.form(source))
    setting = dataclasses.replace(setting, evaluated=frozenset(kept_out))
    shares = in_parts({name: source.weight for name, source in sources.items()}, config.evaluation.num_problems)
    opened: dict[str, Opened] = {}
    # A hash keeps its questions out of whatever holds out by hash; from those beside an evaluation file they are kept
    # by their text.
    for name in sorted(sources, key=lambda name: name in of_eval):
        if sources[name].path:
            opened[name] = open_file(
                name,
                setting,
                eval_rows=of_eval.get(name),
                num_held_out=shares[name],
                set_aside=(set_aside or {}).get(name, {}),
            )
        else:
            opened[name] = open_procedural(name, setting, num_held_out=shares[name])
        if name not in of_eval:
            kept_out |= {p.question.strip() for p in opened[name].held_out}
            setting = dataclasses.replace(setting, evaluated=frozenset(kept_out))
    in_order = [opened[name] for name in sources]
    check_epochs(config, in_order)
    return in_order


def check_epochs(config: Config, opened: Sequence[Opened]) -> None:
    """Refuses a run whose updates ask the rows of a file more often than `prompts.num_epochs`.

    Raises:
      ValueError: says how many updates would fit.
    """
    bound, per_update = config.prompts.num_epochs, config.rounds.groups_per_update
    all_weights = sum(o.source.weight for o in opened)
    for source in opened if bound else ():
        if source.is_endless:
            continue
        num_groups = bound * len(source.problems) * all_weights / source.source.weight
        num_updates = int(num_groups + 1e-6) // per_update
        if num_updates < config.run.num_updates:
            raise ValueError(
                f"run.num_updates={config.run.num_updates} asks the {len(source.problems)} rows of "
                f"{source.source.path} more often than prompts.num_epochs={bound} allows: at most {num_updates} "
                f"updates of {per_update} groups fit"
            )
