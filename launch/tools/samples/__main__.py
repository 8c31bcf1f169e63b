"""Samples of a run: `python -m launch.tools.samples --run_dir=runs/NAME [--sort=reward|lag|length] [--grep=TEXT]`.

Shows the content of samples.jsonl (config section `samples`): prompts, responses, rewards by verifier, advantages, and
weight versions. The run may still be in progress. --compare shows problems at the first and the last evaluation. Lines
are not wrapped in a pipe. --json prints JSON for other programs.
"""

import json
import pathlib
import re
import sys

from absl import flags
from rich.console import Console
from rich.text import Text

from configs.run_folder import RunFolder
from launch import cli
from launch.terminal import make_console
from launch.tools.samples import samples_view
from launch.tools.samples.samples_view import SORTS, Query, Samples, as_json, choose, pairs, parse_steps, read_samples

_SORT = flags.DEFINE_enum("sort", "step", list(SORTS), "Sort key, descending. `length` counts sampled tokens.")
_REVERSE = flags.DEFINE_boolean("reverse", False, "Sort in ascending order.")
_GREP = flags.DEFINE_string(
    "grep", None, "Regular expression to find in the prompt or the response. Begin with (?i) to ignore case."
)
_STEP = flags.DEFINE_string("step", None, "Step or range of steps, as in 40-60.")
_EVAL = flags.DEFINE_boolean("eval", None, "Show only evaluations. --noeval shows only training.")
_LIMIT = flags.DEFINE_integer("limit", 10, "Maximum number of samples.", lower_bound=1)
_COMPARE = flags.DEFINE_boolean(
    "compare", False, "Show problems with their responses at the first and last evaluation."
)
_FULL = flags.DEFINE_boolean("full", False, "Show long texts in full.")
_JSON = flags.DEFINE_boolean(
    "json", False, "Print one JSON object per line, in full. With --compare, one with `first` and `last` per problem."
)
SHARED_FLAGS = ("run_dir",)
"""Shared flags that this command accepts."""


def main() -> int:
    """Prints the selected samples; exits with 2 if the folder is no run or has no samples."""
    with cli.usage_errors():
        folder = pathlib.Path(cli.run_dirs(most=1)[0])
        query = _query()
        samples = read_kept(folder)
    console = make_console(highlight=False)
    said = _print(console, samples, query)
    if samples.num_unreadable:
        said += f"; {samples.num_unreadable} unreadable lines in samples.jsonl"
    if _JSON.value:
        print(said, file=sys.stderr)
    else:
        console.print(Text(said, style="dim"), soft_wrap=True)
    return 0


def _print(console: Console, samples: Samples, query: Query) -> str:
    """Prints the selection and returns its size; JSON is ASCII, so no control character reaches the terminal."""
    if _COMPARE.value:
        found = pairs(samples, limit=query.limit)
        if _JSON.value:
            for first, last in found:
                print(json.dumps({"first": as_json(first), "last": as_json(last)}))
        else:
            samples_view.show_pairs(console, found, full=_FULL.value)
        return f"{len(found)} problem{'s' * (len(found) > 1)}" if found else "no problem with two evaluations"
    chosen, num_found = choose(samples, query)
    if _JSON.value:
        for sample in chosen:
            print(json.dumps(as_json(sample)))
    else:
        samples_view.show(console, chosen, full=_FULL.value, grep=query.grep)
    if not num_found:
        return f"no matching samples (of {samples.num_responses} stored)"
    return f"{len(chosen)} of {num_found} matching samples, of {samples.num_responses} stored"


def read_kept(folder: pathlib.Path) -> Samples:
    """Returns the samples of a run folder; raises ValueError if the folder is no run folder, or has no samples."""
    run = RunFolder(folder)
    if not run.config_file.is_file():
        raise ValueError(f"{folder} is not a run folder (it has no {run.config_file.name})")
    samples = read_samples(folder)
    if not samples.groups:
        raise ValueError(
            f"{run.samples} has no samples: the first ones are written with the first evaluation and update "
            "(samples.groups_per_round; runs of older versions have none)"
        )
    return samples


def _query() -> Query:
    chosen_by = [flag.name for flag in (_SORT, _REVERSE, _GREP, _STEP, _EVAL) if flag.present]
    if _COMPARE.value and chosen_by:
        raise ValueError(f"--{chosen_by[0]} has no effect with --compare; remove it")
    try:
        grep = re.compile(_GREP.value) if _GREP.value is not None else None
    except re.error as e:
        raise ValueError(f"--grep={_GREP.value!r} is not a regular expression: {e}") from e
    return Query(
        sort=_SORT.value,
        reverse=_REVERSE.value,
        grep=grep,
        steps=parse_steps(_STEP.value) if _STEP.value is not None else None,
        is_eval=_EVAL.value,
        limit=_LIMIT.value,
    )


if __name__ == "__main__":
    cli.run(main)
