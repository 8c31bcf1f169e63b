"""One run of the main job, as a user starts it; a finished one is taken from its folder."""

import json
import pathlib
import shutil
import subprocess
import sys
import time

from configs.run_folder import RunFolder


def run_job(config: str, folder: pathlib.Path, *, reuse: bool, **overrides: object) -> dict:
    """The run's summary, with `wall_s`: everything from the command on.

    Args:
      config: a preset's file.
      folder: the run's; deleted first, unless it holds a finished run that may be reused.
      reuse: whether it may.
      **overrides: fields of the configuration, "__" for ".".

    Raises:
      RuntimeError: the job failed; with its last lines.
    """
    result = folder / "result.json"
    if reuse and result.is_file():
        return json.loads(result.read_text())
    shutil.rmtree(folder, ignore_errors=True)
    start = time.monotonic()
    command = [sys.executable, "-m", "launch.local", f"--config={config}", f"--config.run.dir={folder}"]
    command += [f"--config.{name.replace('__', '.')}={value}" for name, value in overrides.items()]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-3000:]}")
    summary = json.loads(RunFolder(folder).summary.read_text()) | {"wall_s": time.monotonic() - start}
    result.write_text(json.dumps(summary))
    return summary
