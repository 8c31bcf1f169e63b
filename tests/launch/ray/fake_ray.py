"""Ray as a test says it answers: stations that do what they were told to, and nothing that waits."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

SILENCE = object()
"""What a call answers that is never answered."""


class FakeStation:
    """Answers each call with what stands under its name: a value, what a function says, an error, or silence."""

    def __init__(self, **answers: Any) -> None:
        self._answers = answers
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> SimpleNamespace:
        def remote(*_: Any, **__: Any) -> Any:
            self.calls.append(name)
            answer = self._answers.get(name)
            return answer() if callable(answer) else answer

        return SimpleNamespace(remote=remote)


class Berths:
    """Gives these stations, one after the other."""

    def __init__(self, *stations: FakeStation) -> None:
        self.left = list(stations)

    def take(self) -> FakeStation:
        return self.left.pop(0)

    def __str__(self) -> str:
        return "1 CPU"


def put_in(monkeypatch: pytest.MonkeyPatch, module: Any, *, waiting: Callable[[float], None] = lambda _: None) -> None:
    """Puts it in the place of a module's `ray`; `waiting` hears for how long Ray was to wait in vain."""
    import ray.exceptions

    def wait(answers: list[Any], *, timeout: float) -> tuple[list[Any], list[Any]]:
        if answers[0] is not SILENCE:
            return answers, []
        waiting(timeout)
        return [], answers

    def get(answer: Any, timeout: float | None = None) -> Any:
        if answer is SILENCE:
            raise ray.exceptions.GetTimeoutError(f"after {timeout}")
        if isinstance(answer, BaseException):
            raise answer
        return answer

    fake = SimpleNamespace(wait=wait, get=get, kill=lambda _: None, exceptions=ray.exceptions)
    monkeypatch.setattr(module, "ray", fake)
