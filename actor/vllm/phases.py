"""How far an engine's start is, from what vLLM logs in its processes while it starts."""

import logging

from bridge.phases import say_phase

# Part of what vLLM logs -> what begins then.
PHASES = {
    "Initializing a V1 LLM engine": "engine: setting up its device",
    "Starting to load model": "engine: building the model",
    "Model loading took": "engine: measuring the memory for its cache",
    "KV cache size: %s tokens": "engine: reserving its cache",
    "Warming up model for the compilation": "engine: compiling and warming up",
    "Compiling a graph": "engine: compiling its graphs",
    "Profiling CUDA graph memory": "engine: capturing CUDA graphs",
    "init engine (profile, create kv cache, warmup model) took": "engine: ready, telling the actor",
}


class _Phases(logging.Handler):
    """Says what a log record means; each once."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._said: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        for part, phase in PHASES.items():
            if isinstance(record.msg, str) and part in record.msg and phase not in self._said:
                self._said.add(phase)
                say_phase(phase)


def say_phases() -> None:
    """Listens to vLLM in this process; its log shows as much as before. May be called again."""
    logger = logging.getLogger("vllm")
    if any(isinstance(handler, _Phases) for handler in logger.handlers):
        return
    shown = logger.getEffectiveLevel()
    for handler in logger.handlers:
        handler.setLevel(max(handler.level, shown))
    logger.setLevel(min(shown, logging.INFO))
    logger.addHandler(_Phases())
