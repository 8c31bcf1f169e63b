"""Evaluates a model on vLLM: `python -m launch.tools.evaluate --model=FOLDER --prompts=FILE --k=8 --out=results.json`.

For a run's checkpoint, on its own or other sets: `python -m launch.tools.evaluate --run_dir=FOLDER [--step=N]`. Each
--prompts is one set: a file (.jsonl, .parquet, .arrayrecord), a Hugging Face dataset (hf:NAME), a reasoning-gym task
(task:FAMILY) or an environment (environment:NAME). --config.evaluation.sets.NAME.FIELD=VALUE sets further fields of a
set. docs/evaluation.md explains the results.
"""

import asyncio
import contextlib
import importlib.util
import multiprocessing
import os
import pathlib
import signal
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from absl import flags

from actor.environments.environment_pool import check_environments
from actor.rewards.verifier_pool import check_own
from bridge.rollout_types import Version
from bridge.timeline import Timeline
from configs import overrides
from configs.run_folder import RunFolder
from configs.schema import Config
from launch import cli
from launch.startup import prepare_run
from launch.startup.build_actor import check_sandbox, open_judge
from launch.supervision.process_tree import die_with_parent
from launch.terminal import WaitMessages
from launch.tools.evaluate import eval_runner, export, results, settings
from launch.tools.evaluate.eval_runner import Progress, leaves
from launch.tools.out_file import check_out_file

SHARED_FLAGS = ("config", "run_dir")
"""Shared flags that this command accepts."""
_MODEL = flags.DEFINE_string("model", None, "Hugging Face folder (safetensors) of any model family that vLLM supports.")
_STEP = flags.DEFINE_integer(
    "step", None, "With --run_dir: step of the checkpoint; default: the newest.", lower_bound=0
)
_PROMPTS = flags.DEFINE_multi_string(
    "prompts",
    [],
    "Evaluation set: [NAME=] and a file, hf:DATASET, task:FAMILY, environment:NAME, or heldout (from the prompts of "
    "the run or preset). May be given several times. By default the sets of the run or preset.",
)
_K = flags.DEFINE_integer("k", None, "Samples per problem; default: the set's value, else 1.", lower_bound=1)
_TEMPERATURE = flags.DEFINE_float(
    "temperature",
    None,
    "Sampling temperature. 0 is greedy. By default the value of the set, run or preset, else 0 for one sample per "
    "problem and 1 for more.",
)
_TOP_P = flags.DEFINE_float("top_p", None, "Nucleus sampling probability; default: the set's value, else 1.")
_MAX_TOKENS = flags.DEFINE_integer(
    "max_tokens",
    None,
    "Maximum tokens per response; default: the set's value. Without a run or preset, and for a supervised one without "
    "sampling.max_response_tokens: at most 1024 and half the model's context.",
    lower_bound=1,
)
_VERIFIER = flags.DEFINE_string("verifier", None, "Verifier for rows without their own: math, exact, code, judge, ...")
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the sampling. Samples are drawn independently.")
_LIMIT = flags.DEFINE_integer("limit", None, "Maximum problems per set, taken from its start.", lower_bound=1)
_OUT = flags.DEFINE_string("out", "results.json", "JSON file for the results, written atomically at the end.")
_INTERRUPTED = "interrupted: nothing is written"
_SHOW = flags.DEFINE_integer("show", 8, "Problems per set whose responses are included in the results.", lower_bound=0)


def main() -> int:
    """Evaluates and writes the results; returns 1 if the engine failed, 130 if interrupted."""
    die_with_parent()
    cli.log_to_stderr()
    with cli.usage_errors():
        out = check_out_file(_OUT.value)
        model, step, config = _what()
        notes = check_own(config.custom_verifiers)
        check_environments(config.environments_played, config.environments)
        for note in (*notes, *check_sandbox(config)):
            print(note, flush=True)
        run = None if flags.FLAGS.run_dir is None else RunFolder(pathlib.Path(flags.FLAGS.run_dir))
        sets = eval_runner.open_problems(config, model, run)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    progress = Progress({one.name: len(one.problems) * one.config.k for one in sets.sets})
    with contextlib.ExitStack() as parts:
        with cli.usage_errors():
            folder = parts.enter_context(tempfile.TemporaryDirectory(prefix="sluice-evaluate-"))
            judge = None
            if "judge" in config.parts:
                judge = parts.enter_context(open_judge(config, out.with_name(f"{out.stem}.judge.log")))
            timeline = Timeline(folder, "evaluate")
            parts.callback(timeline.close)
        progress.say(f"starting vLLM: {model}, {config.model.served_dtype}, at most {config.model.max_tokens} tokens")
        try:
            with _ended_at_once(parts), WaitMessages(progress.say, "starting vLLM"):
                engine = eval_runner.start_engine(model, config, seed=_SEED.value)
            version = Version(incarnation=0, step=step or 0)
            evaluation = eval_runner.evaluate_all(config, sets, engine, timeline, judge, version, progress)
            with progress:
                groups = asyncio.run(evaluation)
        except KeyboardInterrupt:
            print(_INTERRUPTED, file=sys.stderr)
            return 130
        except Exception as e:
            first, *others = leaves(e)
            more = f" (and {len(others)} more errors)" if others else ""
            print(f"error: {cli.one_line(RuntimeError(first))}{more}", file=sys.stderr)
            return 1
    found = results.results_of(
        sets,
        groups,
        decode=sets.tokenizer.decode,
        show=_SHOW.value,
        head=_head(model, step, config) | {"seconds": progress.seconds, "sampled_tokens": progress.num_tokens},
    )
    results.print_table(found)
    try:
        results.write(found, out)
    except OSError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    print(f"results      {out}")
    if run is not None:
        results.keep_beside(found, run)
    return 0


def _what() -> tuple[pathlib.Path, int | None, Config]:
    """Returns (model folder, step of the run or None, config); raises ValueError for an invalid command line."""
    run_dir, preset = flags.FLAGS.run_dir, flags.FLAGS.config
    given_model = _MODEL.value
    if (given_model is None) == (run_dir is None):
        raise ValueError("set --model=FOLDER, or --run_dir=FOLDER of a run with a checkpoint")
    asked = settings.EvalRequest(
        prompts=_PROMPTS.value,
        k=_K.value,
        temperature=_TEMPERATURE.value,
        top_p=_TOP_P.value,
        max_tokens=_MAX_TOKENS.value,
        limit=_LIMIT.value,
        verifier=_VERIFIER.value,
    )
    if given_model is None:
        if preset is not None:
            raise ValueError("--config has no effect with --run_dir; remove it")
        base = prepare_run.open_prepared(run_dir).config
        step, model = export.model_of(RunFolder(pathlib.Path(run_dir)), _STEP.value)
        return model, step, settings.resolve_config(base, asked, cli.given_overrides(), model)
    if _STEP.value is not None:
        raise ValueError("--step requires --run_dir")
    model = pathlib.Path(given_model).expanduser().resolve()
    if preset is None and not asked.prompts:
        raise ValueError("set --prompts, or --config=NAME to use its evaluation sets")
    base = settings.default_base(model) if preset is None else overrides.load_preset(preset)
    return model, None, settings.resolve_config(base, asked, cli.given_overrides(), model)


def _head(model: pathlib.Path, step: int | None, config: Config) -> dict[str, Any]:
    return {
        "model": str(model),
        "run_dir": flags.FLAGS.run_dir,
        "step": step,
        "seed": _SEED.value,
        "dtype": config.model.served_dtype,
        "max_model_tokens": config.model.max_tokens,
    }


@contextlib.contextmanager
def _ended_at_once(parts: contextlib.ExitStack) -> Iterator[None]:
    """Exits the process and its children on Ctrl-C, because vLLM's startup swallows exceptions."""

    def end(*_: object) -> None:
        print(_INTERRUPTED, file=sys.stderr, flush=True)
        for child in multiprocessing.active_children():
            child.kill()
        parts.close()
        os._exit(130)

    previous = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    # A multiprocessing child imports the main module of this program, unless it is a `__main__`. With this spec, vLLM's
    # processes import `launch` and therefore exit on Ctrl-C without a traceback.
    sys.modules["__main__"].__spec__ = importlib.util.find_spec("launch.startup.tiny_model")
    cli.run(main)
