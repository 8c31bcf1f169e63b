"""Code that runs as several JAX processes on this machine, joined by `jax.distributed`, with gloo between them."""

import concurrent.futures
import os
import pathlib
import socket
import subprocess
import sys
from collections.abc import Mapping

ROOT = pathlib.Path(__file__).parents[2]
_ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
CONNECT = """
import sys
from learner.distributed.initialize import connect
from learner.distributed.initialize import Identity
index, count = int(sys.argv[2]), int(sys.argv[3])
hosts = connect(Identity(index=index, count=count, coordinator=sys.argv[1]), init_timeout_s=60, peer_timeout_s=10)
"""
"""What the code of a test begins with: it has `hosts`."""


def free_address() -> str:
    """One of loopback that nobody listens at."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{s.getsockname()[1]}"


def start(
    code: str, *arguments: object, count: int, devices_each: int = 1, environment: Mapping[str, str] = {}
) -> list[subprocess.Popen[str]]:
    """A process for each index; sys.argv is address, index, count, then the arguments."""
    address = free_address()
    flags = f"--xla_force_host_platform_device_count={devices_each} --xla_cpu_use_fusion_emitters=false"
    env = {**os.environ, **_ENVIRONMENT, "XLA_FLAGS": flags, "PYTHONPATH": str(ROOT), **environment}
    return [
        subprocess.Popen(
            [sys.executable, "-c", code, address, str(index), str(count), *map(str, arguments)],
            cwd=ROOT,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(count)
    ]


def run(
    code: str, *arguments: object, count: int, devices_each: int = 1, environment: Mapping[str, str] = {}
) -> list[str]:
    """What each process printed; an assertion error with their errors if one failed."""
    processes = start(code, *arguments, count=count, devices_each=devices_each, environment=environment)
    try:
        with concurrent.futures.ThreadPoolExecutor(count) as readers:  # at once: one whose pipe is full would wait
            done = list(readers.map(lambda p: p.communicate(timeout=600), processes))
    finally:
        for p in processes:
            p.kill()
    failed = [
        f"process {i} ended with {p.returncode}: {out}{err[-3000:]}"
        for i, (p, (out, err)) in enumerate(zip(processes, done, strict=True))
        if p.returncode != 0
    ]
    assert not failed, "\n".join(failed)
    return [out for out, _ in done]
