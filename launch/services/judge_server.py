"""Judge server: a second vLLM on the actor's machine, and its supervision.

As in RollPacker section 4.3, the judge shares the GPUs of the rollout (docs/llm_judge.md).

The process first asks the kernel to kill it with its parent, which survives exec, and then execs vLLM. It runs the
server's module because the `vllm` command needs package metadata that CPU builds lack.
"""

import contextlib
import dataclasses
import os
import pathlib
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence

from absl import logging

from bridge.credentials import without_secrets
from configs import custom_functions
from configs.sections.rewards import JudgeConfig
from launch.supervision import process_tree
from launch.supervision.child import telling_line
from launch.supervision.hang_detector import SigstopWatchdog
from launch.supervision.placement import core_ids

STEADY_S = 60.0
"""Seconds of service after which the restart count resets; startup time does not count."""
LOOK_S = 5.0
"""Interval between health checks of a server that has served, in seconds; the caller sets it during startup."""
MAX_MISSED = 6
"""Consecutive health checks without an answer after which a server is considered hung."""


class SidecarHealth:
    """Health of one server process, from its start to its exit."""

    def __init__(self, *, start_timeout_s: float, now_s: float) -> None:
        self._start_timeout_s, self._started_s = start_timeout_s, now_s
        self._served_from_s: float | None = None
        self._answered_s = now_s
        self._looked_s = now_s
        self._num_missed = 0

    def is_due(self, now_s: float) -> bool:
        """Returns True if a health check is due."""
        return self._served_from_s is None or now_s - self._looked_s >= LOOK_S

    def looked(self, *, answers: bool, now_s: float) -> str:
        """Records a health check; returns the reason to kill the process, or an empty string."""
        self._looked_s = now_s
        if answers:
            self._num_missed, self._answered_s = 0, now_s
            if self._served_from_s is None:
                self._served_from_s = now_s
            return ""
        if self._served_from_s is None:
            is_late = now_s - self._started_s > self._start_timeout_s
            return f"start timed out after {self._start_timeout_s:g} s (supervision.start_timeout_s)" if is_late else ""
        self._num_missed += 1
        return f"{self._num_missed} failed health checks in a row" if self._num_missed >= MAX_MISSED else ""

    @property
    def was_steady(self) -> bool:
        """True if the process served long enough to reset the restart count."""
        return self._served_from_s is not None and self._answered_s - self._served_from_s >= STEADY_S


COMMAND = (sys.executable, "-P", "-m", "launch.services.judge_server")
HOST = "127.0.0.1"
_LOOK_S = 0.2
_BACKOFF_S = 1.0
_HEALTH_S = 5.0
_END_S = 15.0
_NO_PROXIES = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class JudgeService:
    """Judge server that runs until this object is closed."""

    def __init__(
        self,
        config: JudgeConfig,
        log: pathlib.Path,
        *,
        stopped_s: float,
        start_timeout_s: float,
        max_restarts: int,
        beats: Callable[[], None] = lambda: None,
        command: Sequence[str] = COMMAND,
    ) -> None:
        """Starts the server and waits until it answers; raises ValueError with the reason if it does not start.

        A server suspended for `stopped_s` is killed. After `max_restarts` consecutive restarts `failure` is set;
        serving for one minute resets the count. `beats` is called several times per second during startup. `command`
        stands before the arguments of `vllm serve`.
        """
        self._config, self._log, self._command = config, log, command
        self._engine = config.engine_settings
        self._start_timeout_s, self._max_restarts = start_timeout_s, max_restarts
        self._stopped = SigstopWatchdog(stopped_s)
        self._is_closing = threading.Event()
        self._failure = ""
        self._log_start = 0
        """Offset in the log at which the running server began."""
        self.num_restarts = 0
        self._folder = tempfile.TemporaryDirectory(prefix="sluice-judge-")  # accessible to its owner only
        self._key = secrets.token_hex(32)
        self._port = _free_port()
        key_file = pathlib.Path(self._folder.name) / "key"
        with open(os.open(key_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(self._key)
        self.config = dataclasses.replace(
            config,
            colocate=False,
            url=f"http://{HOST}:{self._port}/v1",
            api_key_file=str(key_file),
            outage_timeout_s=max(config.outage_timeout_s, start_timeout_s),
        )
        """Config with the server's address and key file, for `actor.rewards.verifiers.judge.Judge`."""
        # The server dies with the thread that started it. So one thread, which lives as long as this process, does
        # every restart.
        self._thread = threading.Thread(target=self._watch, name="judge", daemon=True)
        try:
            self._process = self._start()
        except BaseException:
            self._folder.cleanup()
            raise
        try:
            self._wait_until_ready(beats)
        except BaseException:
            self.close()
            raise
        self._thread.start()
        logging.info("judge ready model=%s url=%s pid=%d", config.model, self.config.url, self._process.pid)

    @property
    def pid(self) -> int:
        """Process id of the running server."""
        return self._process.pid

    @property
    def failure(self) -> str:
        """Reason why the server is no longer restarted; empty while it is."""
        return self._failure

    def close(self) -> None:
        """Stops the server and its children."""
        self._is_closing.set()
        if self._thread.is_alive():
            self._thread.join()
        self._end()
        self._folder.cleanup()

    def _start(self) -> subprocess.Popen[bytes]:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._log_start = self._log.stat().st_size if self._log.exists() else 0
        cores = core_ids(self._engine.cpu_cores) if self._engine.cpu_cores else None
        with open(self._log, "ab") as output:
            process = subprocess.Popen(
                [*self._command, *arguments(self._config, self._port)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=environment(self._config, os.environ, key=self._key),
            )
        if cores is not None:
            try:  # before the process has threads, which inherit the binding
                os.sched_setaffinity(process.pid, cores)
            except OSError as e:
                process.kill()
                process.wait()
                raise ValueError(
                    f"judge.engine.cpu_cores={self._engine.cpu_cores}: the judge cannot run on these cores: "
                    f"{e.strerror}"
                ) from e
        return process

    def _wait_until_ready(self, beats: Callable[[], None]) -> None:
        end_s = time.monotonic() + self._start_timeout_s
        while not self._answers():
            if (code := self._process.poll()) is not None:
                raise ValueError(f"judge start failed (code {code}): {self._last_error()}; see {self._log}")
            if time.monotonic() > end_s:
                raise ValueError(
                    f"judge start timed out after {self._start_timeout_s:g} s (supervision.start_timeout_s); "
                    f"see {self._log}"
                )
            beats()
            self._is_closing.wait(_LOOK_S)

    def _last_error(self) -> str:
        return telling_line(self._log, since=self._log_start)

    def _answers(self) -> bool:
        try:
            with _NO_PROXIES.open(f"http://{HOST}:{self._port}/health", timeout=_HEALTH_S) as reply:
                return reply.status == 200 and self._process.poll() is None
        except (urllib.error.URLError, OSError):
            return False

    def _watch(self) -> None:
        num_in_a_row, health = 0, self._health()
        health.looked(answers=True, now_s=time.monotonic())
        while not self._is_closing.wait(_LOOK_S):
            code = self._process.poll()
            if code is None:
                self._end_if_stopped()
                self._end_if_hung(health)
                continue
            num_in_a_row = 1 if health.was_steady else num_in_a_row + 1
            said = self._last_error()
            if num_in_a_row > self._max_restarts:
                self._failure = f"the judge died {num_in_a_row} times in a row (code {code}): {said}; see {self._log}"
                logging.error("%s", self._failure)
                return
            logging.error("judge died, restarting code=%s error=%r", code, said)
            self._end()  # also kills an engine left by a server that was killed
            if self._is_closing.wait(_BACKOFF_S * (num_in_a_row - 1)):
                return
            health = self._health()
            self.num_restarts += 1
            try:
                self._process = self._start()
            except (ValueError, OSError) as e:  # the next check retries, because memory may become free
                logging.error("judge restart failed error=%s", e)

    def _health(self) -> SidecarHealth:
        return SidecarHealth(start_timeout_s=self._start_timeout_s, now_s=time.monotonic())

    def _end_if_hung(self, health: SidecarHealth) -> None:
        if health.is_due(time.monotonic()):
            answers = self._answers()
            if reason := health.looked(answers=answers, now_s=time.monotonic()):
                logging.error("judge killed reason=%s", reason)
                self._kill()

    def _end_if_stopped(self) -> None:
        """Kills the server if one of its processes was suspended for too long, because its clients would hang."""
        below = {self._process.pid} | process_tree.descendants(self._process.pid)
        for pid in self._stopped.look(below & process_tree.stopped_below(os.getpid())):
            logging.error("judge process suspended for too long (supervision.heartbeat_timeout_s), killed pid=%d", pid)
            self._kill()

    def _end(self) -> None:
        """Sends SIGTERM, then SIGKILL to the process group, which includes the engine."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        self._kill()

    def _kill(self) -> None:
        """Sends SIGKILL to the process group and waits for its exit; logs an error if a process survives."""
        try:
            process_tree.end_group(self._process.pid)
            self._process.wait(process_tree.EXIT_S)
        except (OSError, subprocess.TimeoutExpired) as e:
            logging.error("judge not killed error=%r", str(e))


def arguments(config: JudgeConfig, port: int) -> list[str]:
    """Returns the arguments of `vllm serve`."""
    engine = config.engine_settings
    found = [
        f"--model={config.model}",
        f"--host={HOST}",
        f"--port={port}",
        f"--served-model-name={config.model}",
        f"--max-model-len={engine.max_model_tokens}",
        f"--max-num-seqs={engine.max_num_seqs}",
        f"--gpu-memory-utilization={engine.gpu_memory_utilization}",
        "--no-enable-log-requests",
        "--disable-uvicorn-access-log",
    ]
    if engine.cpu_offload_gib:
        found.append(f"--cpu-offload-gb={engine.cpu_offload_gib}")
    if engine.offload_group_size:
        found += [
            f"--offload-group-size={engine.offload_group_size}",
            f"--offload-num-in-group={engine.offload_num_in_group}",
            f"--offload-prefetch-step={engine.offload_prefetch_step}",
        ]
    return found


def environment(config: JudgeConfig, around: Mapping[str, str], *, key: str) -> dict[str, str]:
    """Returns the server's environment, with its key (hidden from command lines) and without the run's secrets."""
    found = without_secrets(around) | {
        "VLLM_API_KEY": key,
        "PYTHONPATH": custom_functions.python_path(),
        "SLUICE_ENGINE": "1",  # its engine process exits with it (`actor.vllm.worker.register`)
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_CPU_KVCACHE_SPACE": str(config.engine_settings.kv_cache_gib),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
    }
    found.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    if cores := config.engine_settings.cpu_cores:
        found["VLLM_CPU_OMP_THREADS_BIND"] = cores
    else:
        found.pop("VLLM_CPU_OMP_THREADS_BIND", None)  # that variable binds the actor's engine
    # The variable stays, because it identifies processes that survive a killed actor.
    return found | {process_tree.VARIABLE: str(os.getpid())}


def _free_port() -> int:
    with socket.socket() as one:
        one.bind((HOST, 0))
        return one.getsockname()[1]


MODULE = "vllm.entrypoints.openai.api_server"


def main() -> None:
    """Replaces this process with the server."""
    process_tree.die_with_parent()
    os.execv(sys.executable, [sys.executable, "-P", "-m", MODULE, *sys.argv[1:]])


if __name__ == "__main__":
    main()
