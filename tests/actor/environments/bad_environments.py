"""Environments of a user's own that misbehave as their row says."""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from numpy import random as numpy_random

from actor.environments.protocol import Step


class Bad:
    """`row["how"]` names the trouble, `row["at"]` where; with a file `row["attempts"]` only the first has it."""

    def reset(self, row: Mapping[str, Any]) -> list[dict[str, str]]:
        self._row = row
        self._is_first = True
        if "attempts" in row:
            with open(row["attempts"], "a+") as f:
                self._is_first = f.tell() == 0
                f.write(".")
        self._trouble("reset")
        return [{"role": "user", "content": f"pid {os.getpid()}"}]

    def step(self, action: str) -> Step:
        self._trouble("step")
        if action == "where":
            said = f"{os.getpid()} {os.getppid()}"
        elif action == "secret":
            said = repr(sorted({"SLUICE_TOKEN", "AWS_SECRET_ACCESS_KEY", "PGPASSWORD"} & os.environ.keys()))
        elif action == "row":
            said = json.dumps(self._row)
        elif action == "modules":
            said = repr(sorted({"jax", "torch", "vllm"} & sys.modules.keys()))
        else:
            said = action
        return Step(messages=[{"role": "user", "content": said}], reward=0.5, done=action == "end")

    def close(self) -> None:
        self._trouble("close")
        if "closed" in self._row:
            open(self._row["closed"], "w").close()

    def _trouble(self, where: str) -> None:
        if where != self._row.get("at") or not self._is_first:
            return
        how = self._row["how"]
        if how == "hang":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            while True:
                pass
        if how == "sleep":
            time.sleep(3600)
        if how == "crash":
            os._exit(7)
        if how == "exit":
            sys.exit(3)
        if how == "raise":
            raise RuntimeError("broken")
        if how == "memory":
            bytearray(5 * 2**30)  # never touched: without a limit it costs nothing
        if how == "spawn":  # a child in a session of its own, which outlives the usual kill of a group
            command = [
                sys.executable,
                "-c",
                f"import os,time; open({self._row['pids']!r}, 'a').write(f'{{os.getpid()}} '); time.sleep(3600)",
            ]
            subprocess.Popen(command, start_new_session=True)
            subprocess.Popen(command)
            while True:
                time.sleep(0.01)


class Unreal(Bad):
    """Answers what is none."""

    def step(self, action: str) -> Any:
        if action == "nan":
            return Step(reward=float("nan"))
        if action in ("1e39", "-2e6", "1e6"):
            return Step(reward=float(action))
        if action == "text":
            return "no step"
        if action == "messages":
            return Step(messages=[{"role": "user"}])
        if action == "huge":
            return Step(messages=[{"role": "user", "content": "x" * 2**25}])
        if action == "surrogate":
            return Step(messages=[{"role": "user", "content": "\ud800"}])
        info: dict[Any, Any] = {"object": object(), 3: {1, 2}}
        info |= {"huge": [2**70], "surrogate": "\ud800", "keys": {(1, 2): 3}, "plain": {"a": [1, 0.5, None]}}
        return Step(info=info)


class Later:
    """Asynchronous."""

    async def reset(self, row: Mapping[str, Any]) -> list[dict[str, str]]:
        await asyncio.sleep(0)
        self._event = asyncio.Event()
        return []

    async def step(self, action: str) -> Step:
        asyncio.get_running_loop().call_soon(self._event.set)
        await self._event.wait()
        return Step(messages=[{"role": "user", "content": action.upper()}])

    async def close(self) -> None: ...


class Chance:
    """Says what the global random state says."""

    def reset(self, row: Mapping[str, Any]) -> list[dict[str, str]]:
        return [{"role": "user", "content": f"{random.random()} {numpy_random.random()} {hash('text')}"}]

    def step(self, action: str) -> Step:
        return Step(done=True)

    def close(self) -> None: ...


class NoStep:
    def reset(self, row): ...

    def close(self) -> None: ...
