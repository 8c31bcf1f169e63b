"""Code that runs in a process of its own with eight CPU devices."""

import os
import pathlib
import subprocess
import sys
from collections.abc import Mapping

ROOT = pathlib.Path(__file__).parents[2]
_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    # How XLA partitions is what these tests are about. How well it then optimises for a CPU is not, and takes longest.
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
}


def run(code: str, *, xla_flags: str = "", environment: Mapping[str, str] = {}) -> str:
    """What the code printed; an assertion error with its errors if it failed."""
    flags = f"--xla_force_host_platform_device_count=8 --xla_cpu_use_fusion_emitters=false {xla_flags}"
    env = {**os.environ, **_ENVIRONMENT, "XLA_FLAGS": flags, **environment}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout
