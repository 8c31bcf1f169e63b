"""What vLLM reads from the environment."""

import os
import sys

from absl import logging

from actor.vllm.compiler import do_without_compiler, engine_is_for_cpus
from actor.vllm.import_path import import_through_link
from configs.schema import Config


def set_environment(config: Config) -> None:
    """Sets what vLLM reads from the environment; call it before vLLM is imported."""
    # Defaults: a user's own setting wins.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    # Not forked: an actor has threads, and a forked engine is never asked to die with it (`vllm.weights.register`).
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(config.actor.kv_cache_gib))
    if groups := config.actor.core_groups:  # an actor's config has its own alone; a tool's one engine is the first
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = groups[0]  # where it was put: another one's may be set around it
    # Nothing leaves this machine: no downloads, no usage reports.
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_DISABLE_TELEMETRY", "DO_NOT_TRACK"):
        os.environ[name] = "1"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ["SLUICE_ENGINE"] = "1"
    if engine_is_for_cpus():
        import_through_link(sys.path)
    if line := do_without_compiler(os.environ):
        logging.warning("%s", line)
