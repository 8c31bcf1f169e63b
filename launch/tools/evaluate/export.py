"""Export of a run's checkpoint to a Hugging Face folder, in a subprocess because it loads jax.

`python -m launch.tools.evaluate.export RUN_DIR STEP TARGET` is that subprocess.
"""

import dataclasses
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

from configs import custom_functions
from configs.run_folder import RunFolder
from launch.supervision import process_tree


def steps_of(run: RunFolder) -> list[int]:
    """Returns the steps of a run's checkpoints and of the exported models in its folder."""
    saved = [int(p.name) for p in run.checkpoints.glob("*") if p.name.isdecimal()] if run.checkpoints.is_dir() else []
    models = [p.name.removeprefix("model-") for p in run.path.glob("model-*") if (p / "config.json").is_file()]
    return sorted({*saved, *(int(m) for m in models if m.isdecimal())})


def model_of(run: RunFolder, step: int | None) -> tuple[int, pathlib.Path]:
    """Returns (step, folder) of a run's model, exporting it to `model-STEP` first if needed; None: the newest step.

    Raises ValueError if the step does not exist, or the export failed.
    """
    there = steps_of(run)
    if not there:
        raise ValueError(f"{run.path} has no checkpoint; the first one is saved after checkpoint.every_n_steps steps")
    if step is not None and step not in there:
        raise ValueError(f"--step: expected one of {', '.join(map(str, there))}, got {step}")
    step = there[-1] if step is None else step
    target = run.model(step)
    if not target.is_dir():
        print(f"exporting the checkpoint of step {step} to {target}", flush=True)
        done = subprocess.run(
            [sys.executable, "-P", "-m", __name__, str(run.path), str(step), str(target)],
            env=os.environ | {"PYTHONPATH": custom_functions.python_path(), "JAX_PLATFORMS": "cpu"},
            stderr=subprocess.PIPE,
            text=True,
        )
        if done.returncode != 0 and not target.is_dir():  # else another command exported it meanwhile
            lines = done.stderr.strip().splitlines() or ["no output"]
            raise ValueError(f"export of checkpoint {step} failed: {lines[-1]}")
    return step, target


def export(run: RunFolder, step: int, target: pathlib.Path) -> None:
    """Restores a checkpoint's weights, verifies their hashes, and writes the model; the run stays unchanged.

    Raises CheckpointError if the checkpoint is damaged or belongs to another model, and ValueError if the folder is no
    run folder.
    """
    from launch.startup.prepare_run import open_prepared
    from learner.checkpoint import Checkpoints
    from learner.model.architecture import Architecture
    from learner.policy_trainer import save_model
    from learner.restore import WeightLoader, load_base, restore_params

    prepared = open_prepared(str(run.path))
    config = dataclasses.replace(
        prepared.config,
        mesh=type(prepared.config.mesh)(),
        learner=dataclasses.replace(prepared.config.learner, num_processes=1),
    )
    architecture = Architecture.from_hf(prepared.model_folder)
    with tempfile.TemporaryDirectory(prefix="sluice-export-") as root:
        # A folder with only this step, because opening the run's own checkpoints deletes incomplete ones, and the run
        # may continue.
        own = RunFolder(pathlib.Path(root)).checkpoints
        own.mkdir()
        (own / str(step)).symlink_to(run.checkpoints.resolve() / str(step))
        hashes = own.with_name(own.name + ".hashes")
        hashes.mkdir()
        file = run.checkpoints.with_name(run.checkpoints.name + ".hashes") / f"{step}.json"
        if file.is_file():
            shutil.copyfile(file, hashes / file.name)
        checkpoints = Checkpoints(own, keep=1)
        try:
            weights = WeightLoader(config, architecture)
            base = load_base(weights, prepared.model_folder)
            _, params = restore_params(checkpoints, weights, prepared.folder, prepared.model_folder, base)
        finally:
            checkpoints.close()
    save_model(config, architecture, params, base, step=step, folder=target, tokenizer_from=prepared.model_folder)


if __name__ == "__main__":
    run_dir, step, target = process_tree.arguments(sys.argv, "RUN_DIR STEP TARGET", command="launch.tools.evaluate")
    if not step.isdecimal():
        process_tree.refuse("launch.tools.evaluate", f"STEP: expected a number, got {step}")
    try:
        export(RunFolder(pathlib.Path(run_dir)), int(step), pathlib.Path(target))
    except (ValueError, OSError) as e:
        sys.exit(str(e).replace("\n", " "))
