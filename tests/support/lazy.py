"""Large libraries for tests, imported at the first use, so that collecting a test file stays cheap."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import reasoning_gym
    import safetensors.torch as safetensors_torch
    import torch
    import transformers

    from actor.rewards.verifiers import reasoning_gym as gym
else:

    class _Lazy:
        """A module that is imported when an attribute is read, but for private ones, which pytest reads."""

        def __init__(self, name: str) -> None:
            self.__name__ = name  # pytest reads it of each parameter

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_"):
                raise AttributeError(name)
            return getattr(importlib.import_module(self.__name__), name)

    gym = _Lazy("actor.rewards.verifiers.reasoning_gym")
    reasoning_gym = _Lazy("reasoning_gym")
    safetensors_torch = _Lazy("safetensors.torch")
    torch = _Lazy("torch")
    transformers = _Lazy("transformers")

__all__ = ["gym", "reasoning_gym", "safetensors_torch", "torch", "transformers"]
