"""Builder and cache of the quickstart's tiny model."""

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable

from bridge.liveness import report_phase
from configs import custom_functions, overrides
from configs.model_sizes import TinyModelRecipe
from configs.schema import Config
from configs.sections import PromptsConfig
from launch.supervision import process_tree


def cache_folder() -> pathlib.Path:
    """Returns $SLUICE_CACHE or `sluice` in the user's cache folder, created. Raises ValueError if not writable."""
    try:
        folder = pathlib.Path(os.environ.get("SLUICE_CACHE") or _users()).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
    except RuntimeError as e:  # no home folder
        raise ValueError(f"no cache folder ({e}); set SLUICE_CACHE to a folder") from e
    except OSError as e:
        raise ValueError(
            f"the cache folder is not writable ({e.filename}: {e.strerror}); set SLUICE_CACHE to a writable folder"
        ) from e
    return folder


def _users() -> pathlib.Path:
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "sluice"


def cached_tiny_model(config: Config, at: Callable[[str], None] = report_phase) -> pathlib.Path:
    """Returns the folder of this task's tiny model, made if needed (about a minute). Raises ValueError on failure."""
    recipe = TinyModelRecipe()
    depends_on = {
        "recipe": dataclasses.asdict(recipe),
        "task": config.prompts.task,
        "task_args": config.prompts.task_args,
        "pattern": config.prompts.pattern,
        "held_out_one_in": config.prompts.held_out_one_in,
        "mixture": sorted(config.prompts.mixture),  # refused when the model is made
    }
    if config.prompts.environment:
        depends_on |= {"environment": config.prompts.environment, "args": config.prompts.environment_args}
    if config.prompts.path:
        fields = ("prompt_field", "answer_field", "verifier", "rewards", "rewards_field", "metadata_field")
        depends_on |= {"rows": _hash_of_rows(config.prompts)} | {name: getattr(config.prompts, name) for name in fields}
    key = hashlib.sha256(json.dumps(depends_on, sort_keys=True).encode()).hexdigest()[:12]
    name = pathlib.Path(config.prompts.path).stem or config.prompts.environment or config.prompts.task
    folder = cache_folder() / f"tiny-{name}-{key}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_name(f".{folder.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # later processes wait here while the first one makes the model
        _make_unless_there(folder, config, at)
    return folder


def _hash_of_rows(prompts: PromptsConfig) -> str:
    try:
        with open(prompts.path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as e:
        raise ValueError(
            f"no prompts file {prompts.path!r} (prompts.path): {e.strerror}. A tiny model is made for the rows of one "
            "local file; for other rows set model.path"
        ) from e


def _make_unless_there(folder: pathlib.Path, config: Config, at: Callable[[str], None]) -> None:
    if (folder / "config.json").is_file():
        return
    at(f"training the tiny model in {folder} (once, about 1 min)")
    # In a subprocess, because this process must never load jax.
    making = subprocess.Popen(
        [sys.executable, "-P", "-m", "launch.startup.tiny_model", str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": custom_functions.python_path()},
    )
    assert making.stdin is not None and making.stdout is not None
    with making:
        with contextlib.suppress(BrokenPipeError):  # the subprocess has exited and printed the reason
            making.stdin.write(overrides.to_json(config))
            making.stdin.close()
        for line in making.stdout:
            at(f"training the tiny model: {line.strip()}")
    if making.returncode != 0:
        raise ValueError(f"training the tiny model failed (exit code {making.returncode}); see the messages above")


def main() -> None:
    """Makes the model in the folder named on the command line, with the config on stdin."""
    (folder,) = process_tree.arguments(sys.argv, "FOLDER", command="launch.local")
    from launch.startup.warmup import make_tiny_model

    config = overrides.from_dict(json.load(sys.stdin))
    recipe = TinyModelRecipe()

    total = recipe.num_clean_steps + recipe.num_typo_steps
    said: set[int] = set()

    def show(step: int, loss: float) -> None:
        eighth = 8 * step // total
        if eighth not in said:
            said.add(eighth)
            print(f"step {step} of {total}, loss {loss:.3f}", flush=True)

    try:
        make_tiny_model(pathlib.Path(folder), recipe, config.prompts, on_progress=show)
    except ValueError as e:
        sys.exit(f"error: {e}")


if __name__ == "__main__":
    main()
