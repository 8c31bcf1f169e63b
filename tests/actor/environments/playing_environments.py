"""Environments that play themselves, by plain HTTP; and a task for `verifiers`."""

import contextlib
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from actor.environments.protocol import Step


def ask(
    address: dict[str, str],
    tokens: list[int],
    *,
    token: str = "",
    body: bytes | None = None,
    timeout_s: float | None = None,
) -> Any:
    """The policy's turn, or the status by which it was refused."""
    request = urllib.request.Request(
        f"{address['url']}/inference/v1/generate",
        data=body or json.dumps({"model": "m", "token_ids": tokens, "sampling_params": {"logprobs": 1}}).encode(),
        headers={"Authorization": f"Bearer {token or address['token']}", "Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return json.load(answer)["choices"][0]
    except urllib.error.HTTPError as e:
        return e.code


class Playing:
    """Says token 1 after each turn, `row["turns"]` times; what else it does is `row["how"]`."""

    plays_itself = True

    def reset(self, row: Mapping[str, Any]) -> list[dict[str, str]]:
        self._row = row
        return []

    def step(self, action: str) -> Step:
        address, said = json.loads(action), [*self._row["prompt"], 0]
        answers: list[Any] = []
        for turn in range(self._row["turns"]):
            if self._row["how"] == "rewrites" and turn:
                said[len(self._row["prompt"]) + 1] += 1
            answer = ask(address, said)
            answers.append(answer if isinstance(answer, int) else answer["finish_reason"])
            if isinstance(answer, int):
                break
            said += [*answer["token_ids"], 1]
        if self._row["how"] == "impatient":
            with contextlib.suppress(TimeoutError):
                ask(address, said, timeout_s=1.0)
            answers.append(ask(address, said))  # is answered when the one before has ended
        if self._row["how"] == "wrong token":
            answers.append(ask(address, said, token="x" * 43))
        if self._row["how"] == "wrong body":
            answers += [ask(address, [], body=b) for b in (b"{", b'{"token_ids": [-1]}', b'{"token_ids": "1"}')]
        return Step(reward=0.5, done=True, info={"answers": answers})

    def close(self) -> None: ...


def verifiers_game(row: Mapping[str, Any]) -> Any:
    """A `verifiers` task whose user says higher or lower, and whose reward is the library's to work out."""
    import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]
    from verifiers.v1.task import Task, TaskData  # pyright: ignore[reportMissingImports]

    class Game(Task):
        @vf.reward
        async def found(self, trace: Any) -> float:
            return float(trace.last_reply.strip() == row["answer"])

    def user(messages: list[dict[str, str]]) -> str | None:
        guess = int(messages[-1]["content"])
        return None if guess == int(row["answer"]) else "higher" if guess < int(row["answer"]) else "lower"

    return Game(TaskData(idx=0, prompt=row["question"])), user
