"""Checkpoints: Orbax for the arrays, with a hash manifest of our own.

One step holds all a restarted learner needs: params and optimizer state (arrays), and the host's books
(prompt iterator, open tickets, ledger; JSON). Orbax's commit is atomic, but it restores flipped bits
without a word, so every committed step's files are hashed and a step whose files no longer match is not
used. A group may be acknowledged only when the step that trained it is committed and hashed.
"""

import concurrent.futures
import json
import os
import pathlib
from collections.abc import Callable
from typing import Any

import orbax.checkpoint as ocp
from absl import logging
from blake3 import blake3

from bridge.files import replace_file


class CheckpointError(ValueError):
    """No usable checkpoint where one must be."""


class Checkpoints:
    """A run's checkpoints. Saves in the background; one save at a time."""

    def __init__(self, folder: str | os.PathLike[str], *, keep: int) -> None:
        """Opens or makes the folder."""
        self._folder = pathlib.Path(folder).resolve()
        self._hashes = self._folder.with_name(self._folder.name + ".hashes")
        self._hashes.mkdir(parents=True, exist_ok=True)
        self._manager = ocp.CheckpointManager(
            self._folder,
            options=ocp.CheckpointManagerOptions(max_to_keep=keep, create=True, enable_async_checkpointing=True),
        )
        self._worker = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: concurrent.futures.Future[int] | None = None

    def save(self, step: int, arrays: Any, host: dict[str, Any]) -> None:
        """Copies the arrays off the devices, then writes them in the background.

        Raises:
          CheckpointError: the save before this one failed, or this step is not after the latest one.
        """
        self.wait()
        latest = self._manager.latest_step()
        if latest is not None and step <= latest:  # Orbax would leave it out without a word
            raise CheckpointError(f"step {step} is not after the latest checkpoint, {latest}, of {self._folder}")
        self._manager.save(
            step, args=ocp.args.Composite(arrays=ocp.args.StandardSave(arrays), host=ocp.args.JsonSave(host))
        )
        self._pending = self._worker.submit(self._commit, step)

    def committed(self) -> int | None:
        """The step of a save that was committed and hashed since last asked; None if there is none."""
        if self._pending is None or not self._pending.done():
            return None
        return self.wait()

    def wait(self) -> int | None:
        """Waits for the save in progress, if any, and returns its step.

        Raises:
          CheckpointError: it failed.
        """
        if self._pending is None:
            return None
        pending, self._pending = self._pending, None
        try:
            return pending.result()
        except Exception as e:
            raise CheckpointError(f"saving a checkpoint to {self._folder} failed: {e}") from e

    def restore_latest(
        self, abstract: Any, *, check: Callable[[dict[str, Any]], None] = lambda host: None
    ) -> tuple[int, Any, dict[str, Any]] | None:
        """The newest intact step: (step, arrays placed like `abstract`, host books). None if there is no step.

        A step whose files do not match their hashes is reported, renamed and passed over. So is a lone first
        save that was killed before it was hashed: nothing was acknowledged yet, so starting afresh is exact.

        `check` sees the host books before any array is read, and may refuse them by raising.

        Raises:
          CheckpointError: there are steps, but not one is intact; nothing is renamed then.
        """
        steps = sorted(self._manager.all_steps(), reverse=True)
        intact = None
        for step in steps:
            problem = self._damage(step)
            if problem is None:
                intact = step
                break
            logging.error("checkpoint damaged step=%d problem=%s; trying the one before", step, problem)
        is_first_save = len(steps) == 1 and not any(self._hashes.glob("*.json"))
        if steps and intact is None and not is_first_save:
            raise CheckpointError(f"no intact checkpoint among steps {steps} of {self._folder}")
        for step in steps:
            if intact is None or step > intact:
                self._set_aside(step)
        if intact is None:
            return None
        host = self._manager.restore(intact, args=ocp.args.Composite(host=ocp.args.JsonRestore()))["host"]
        check(host)
        arrays = self._manager.restore(intact, args=ocp.args.Composite(arrays=ocp.args.StandardRestore(abstract)))
        return intact, arrays["arrays"], host

    def close(self) -> None:
        """Waits for the save in progress and lets go."""
        self.wait()
        self._worker.shutdown()
        self._manager.close()

    def _commit(self, step: int) -> int:
        self._manager.wait_until_finished()
        hashes = json.dumps(_hash_files(self._folder / str(step)), indent=1)
        # Durable: groups are acknowledged on its account.
        replace_file(self._hashes / f"{step}.json", hashes.encode(), is_durable=True)
        for old in self._hashes.glob("*.json"):
            if not (self._folder / old.stem).exists():
                old.unlink()
        return step

    def _set_aside(self, step: int) -> None:
        names = (f"{self._folder.name}.damaged-{step}{again}" for again in ("", *(f".{i}" for i in range(2, 1000))))
        target = next(path for path in map(self._folder.with_name, names) if not path.exists())
        os.replace(self._folder / str(step), target)
        self._manager.reload()

    def _damage(self, step: int) -> str | None:
        manifest = self._hashes / f"{step}.json"
        if not manifest.is_file():
            # Committed by Orbax, killed before hashing: nothing was acknowledged on its account.
            return "it was never hashed"
        try:
            wanted = json.loads(manifest.read_text())
        except ValueError:
            return "its hashes are unreadable"
        got = _hash_files(self._folder / str(step))
        differing = sorted(name for name in {*wanted, *got} if wanted.get(name) != got.get(name))
        return f"{len(differing)} files changed, {differing[0]} among them" if differing else None


def _hash_files(folder: pathlib.Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
