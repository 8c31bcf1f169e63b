"""Processes of their own that end in a line of JSON: parts of a bench whose memory goes with them."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from tests.integration.support.processes import REPO


def last_line_of(
    module: str, *arguments: object, env: Mapping[str, str] | None = None, timeout_s: float = 540.0
) -> Any:
    """Returns what a module prints as its last line. Raises RuntimeError if it failed."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(REPO), "JAX_PLATFORMS": "cpu"} | dict(env or {})
    done = subprocess.run(command, cwd=REPO, env=environment, stdout=subprocess.PIPE, text=True, timeout=timeout_s)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed with {done.returncode}; see above")
    return json.loads(done.stdout.splitlines()[-1])


def print_measured(measure: Callable[..., dict[str, Any]], *arguments: Any) -> None:
    """Prints what a part found, with the seconds that it took, as its last line."""
    began_s = time.monotonic()
    print(json.dumps(measure(*arguments) | {"wall_s": time.monotonic() - began_s}))
