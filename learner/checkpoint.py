"""Checkpoints: Orbax steps and a manifest of file hashes.

A step holds params and optimizer state (arrays) and the host state: prompt iterator, open tickets, group ids (JSON).
Orbax commits atomically but restores flipped bits silently, so a step that no longer matches its hashes is not used. A
group may be acknowledged only after the step that trained it is committed and hashed.

All hosts save and restore together, into a shared folder. Each host hashes the files that it wrote; the leader writes
the manifest (`HostAgreement`). A save that fails on one host fails on all. Hosts learn of it at different times but
must open Orbax together, so only the next save reopens it. A failed save leaves no files, and its groups stay in the
store until a later checkpoint.
"""

import concurrent.futures
import contextlib
import json
import os
import pathlib
import shutil
from collections.abc import Callable, Generator
from typing import Any

import orbax.checkpoint as ocp
from absl import logging
from orbax.checkpoint._src.futures.synchronization import OperationIdGenerator

from bridge.files import replace_file
from learner.checkpoint_hosts import PEER_TIMEOUT_S, CheckpointError, HostAgreement, barrier_fn, reason, system_errors
from learner.distributed.channel import Barrier, Processes, ProcessLostError, SingleProcess

MAX_FAILED_IN_A_ROW = 3
"""Consecutive failed saves that stop a run."""
_HALF = "*.orbax-checkpoint-tmp*"
"""Glob of the folders that Orbax writes a step into before it commits."""


class Checkpoints:
    """Checkpoints of one run, saved in the background, one at a time."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep: int,
        max_failed_in_a_row: int = 1,
        hosts: Processes | None = None,
    ) -> None:
        """Opens or creates the folder, and removes the partial saves of killed processes.

        Every process in `hosts` must create its own `Checkpoints` and call the same methods in the same order. Fewer
        than `max_failed_in_a_row` consecutive failed saves are only logged and counted. Raises ProcessLostError if the
        leader did not join in time.
        """
        self._hosts = hosts or SingleProcess()
        self._agreement = HostAgreement(self._hosts)
        self._folder = pathlib.Path(folder).resolve()
        self._hashes = self._folder.with_name(self._folder.name + ".hashes")
        self._hashes.mkdir(parents=True, exist_ok=True)
        self._keep, self._max_failed_in_a_row = keep, max_failed_in_a_row
        if self._hosts.is_leader:
            self._folder.mkdir(parents=True, exist_ok=True)
            for half in self._folder.glob(_HALF):
                shutil.rmtree(half, ignore_errors=True)
        self._agreement.say("the folder is there")
        self._meetings, self._num_opened = self._hosts.channel("saving"), 0
        self._meeting: Barrier | None = None
        self._manager: ocp.CheckpointManager | None = None
        """Manager that all hosts open together, or None after a failed save."""
        self._opened()
        self._worker = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: tuple[int, concurrent.futures.Future[None]] | None = None
        self.latest: int | None = None
        """Step that a restart resumes from, among the steps that this object restored or saved."""
        self.num_failed = 0
        self._num_failed_in_a_row = 0
        self._failure = ""

    def save(self, step: int, arrays: Any, host: dict[str, Any]) -> None:
        """Copies the arrays off the devices, then writes them in the background.

        Raises CheckpointError after too many consecutive failed saves or if `step` is not after the latest step, and
        ProcessLostError if another host did not report its part of a save.
        """
        self.wait()
        args = ocp.args.Composite(arrays=ocp.args.StandardSave(arrays), host=ocp.args.JsonSave(host))
        try:
            with self._together(step):
                manager = self._opened()
                latest = manager.latest_step()
                if latest is not None and step <= latest:  # Orbax would skip the step silently
                    raise CheckpointError(
                        f"{self._folder}: step to save must be above the latest checkpoint's, {latest}, got {step}"
                    )
                manager.save(step, args=args)
        except (CheckpointError, ProcessLostError):
            raise
        except Exception as e:
            self._failed(step, e)
        else:
            self._pending = step, self._worker.submit(self._commit, step)

    def committed(self) -> int | None:
        """Returns the step of a save committed and hashed since the last call, or None; raises like `wait`."""
        if self._pending is None or not self._pending[1].done():
            return None
        return self.wait()

    def wait(self) -> int | None:
        """Waits for the save in progress; returns its step, None if there is none or it failed. Raises like `save`."""
        if self._pending is None:
            return None
        (step, pending), self._pending = self._pending, None
        try:
            pending.result()
        except ProcessLostError:
            raise
        except Exception as e:
            self._failed(step, e)
            return None
        self.latest, self._num_failed_in_a_row = step, 0
        return step

    def check_saved(self, step: int) -> None:
        """Raises CheckpointError with the failure if `step` is not the latest saved step."""
        if self.latest != step:
            raise CheckpointError(self._failure)

    def restore_latest(
        self,
        abstract: Any,
        *,
        check: Callable[[dict[str, Any]], None] = lambda host: None,
        is_part: bool = False,
    ) -> tuple[int, Any, dict[str, Any]] | None:
        """Restores the newest intact step as (step, arrays placed like `abstract`, host state), or None without steps.

        A damaged step is logged, renamed and skipped. So is a lone first save that was killed before hashing: no group
        was acknowledged, so a fresh start is exact. `check` gets the host state before any array is read and may raise
        to reject it. `is_part` reads only the saved arrays that `abstract` names. Raises CheckpointError, and renames
        nothing, if steps exist but none is intact.
        """
        intact = self._newest_intact() if self._hosts.is_leader else None
        intact = self._agree_on(intact)
        if intact is None:
            return None
        manager = self._opened()
        manager.reload()
        with system_errors(self._folder / str(intact)):
            host = manager.restore(intact, args=ocp.args.Composite(host=ocp.args.JsonRestore()))["host"]
        check(host)
        self.latest = intact
        wanted = _part(abstract) if is_part else ocp.args.StandardRestore(abstract)
        with system_errors(self._folder / str(intact)):
            arrays = manager.restore(intact, args=ocp.args.Composite(arrays=wanted))
        return intact, arrays["arrays"], host

    def close(self) -> None:
        """Waits for the save in progress and releases all resources, also if that save failed and raises."""
        try:
            self.wait()
        finally:
            self._worker.shutdown()
            if self._manager is not None:
                self._manager.close()

    def _opened(self) -> ocp.CheckpointManager:
        """Returns the open manager; if it is closed, all hosts open it together."""
        if self._manager is None:
            self._manager = self._open()
        return self._manager

    def _open(self) -> ocp.CheckpointManager:
        options = ocp.CheckpointManagerOptions(create=False, enable_async_checkpointing=True)
        if self._hosts.count > 1:
            self._meeting = Barrier(self._hosts, self._meetings, timeout_s=PEER_TIMEOUT_S)
            self._catch_up()
            self._num_opened += 1
            options.async_options = ocp.AsyncOptions(barrier_sync_fn=barrier_fn(self._meeting))
            options.multiprocessing_options = ocp.options.MultiprocessingOptions(
                primary_host=0,
                # With named processes Orbax synchronizes at the coordination service: with a deadline and from any
                # thread. Without names it runs a collective.
                active_processes=set(range(self._hosts.count)),
                # A new prefix, because a host that missed a barrier last time would be one barrier behind.
                barrier_sync_key_prefix=f"checkpoints-{self._num_opened}",
            )
        return ocp.CheckpointManager(self._folder, options=options)

    def _catch_up(self) -> None:
        """Advances Orbax's per-process save counter to the hosts' maximum; a save may have begun on some hosts only."""
        own = int(OperationIdGenerator.get_current_operation_id())
        furthest = self._agreement.largest(own)
        while int(OperationIdGenerator.get_current_operation_id()) < furthest:
            OperationIdGenerator.next_operation_id()

    @contextlib.contextmanager
    def _together(self, step: int) -> Generator[None]:
        """Runs a part of a save that all hosts perform; if one host fails, all raise and the step is deleted."""
        try:
            with self._agreement.on_success():
                yield
        except (CheckpointError, ProcessLostError):
            raise
        except Exception:
            self._abandon(step)
            raise

    def _abandon(self, step: int) -> None:
        """Closes Orbax and deletes the partial step after all hosts stopped writing; every host must call it."""
        if self._meeting is not None:
            self._meeting.end()
        manager, self._manager = self._manager, None
        try:
            if manager is not None:
                manager.close()
        except Exception as e:  # close() raises the save's error again
            logging.info("checkpoint manager closed: %s", e)
        self._agreement.await_all()
        # without a manifest no group was acknowledged, even if the step is complete
        is_counted_on = (self._hashes / f"{step}.json").exists()
        if self._hosts.is_leader:
            for left in [*self._folder.glob(_HALF), *([] if is_counted_on else [self._folder / str(step)])]:
                shutil.rmtree(left, ignore_errors=True)

    def _newest_intact(self) -> int | None:
        """Returns the newest step that matches its hashes and renames later steps; the leader only."""
        steps = sorted(self._opened().all_steps(), reverse=True)
        intact = None
        for step in steps:
            problem = self._damage(step)
            if problem is None:
                intact = step
                break
            logging.error("checkpoint damaged, loading the previous one step=%d problem=%s", step, problem)
        is_first_save = len(steps) == 1 and not any(self._hashes.glob("*.json"))
        if steps and intact is None and not is_first_save:
            raise CheckpointError(f"{self._folder}: no intact checkpoint among steps {steps}")
        for step in steps:
            if intact is None or step > intact:
                self._set_aside(step)
        return intact

    def _agree_on(self, intact: int | None) -> int | None:
        """Returns the leader's step; until it is known, the other hosts hash the steps that the leader names."""
        if self._hosts.is_leader:
            self._agreement.say(json.dumps({"restore": intact}))
            return intact
        while "hash" in (said := json.loads(self._agreement.say())):
            self._agreement.all_hashes(self._agreement.own_hashes(self._folder / str(said["hash"])))
        return said["restore"]

    def _failed(self, step: int, error: Exception) -> None:
        """Logs and counts a failed save; does not wait for other hosts, because each one finds out at its own time."""
        self.num_failed += 1
        self._num_failed_in_a_row += 1
        self._failure = f"{self._folder}: cannot save the checkpoint of step {step}: {reason(error)}"
        in_a_row, bound = self._num_failed_in_a_row, self._max_failed_in_a_row
        if in_a_row >= bound:
            which = f" (the last {in_a_row} failed)" if bound > 1 else ""
            raise CheckpointError(f"{self._failure}{which}") from error
        left = bound - in_a_row
        logging.error(
            "%s; free disk space or fix the folder: training continues, a restart would begin at step %s, and %d "
            "further %s the run",
            self._failure,
            self.latest or 0,
            left,
            "failure ends" if left == 1 else "failures end",
        )

    def _commit(self, step: int) -> None:
        folder = self._folder / str(step)
        with self._together(step):
            self._opened().wait_until_finished()
        # Hashing may fail, so it is separate from the exchange: a failure message would be read as hashes.
        with self._together(step):
            own = self._agreement.own_hashes(folder)
        with self._together(step):
            hashes = self._agreement.all_hashes(own)
            if self._hosts.is_leader:
                # Durable, because groups are acknowledged once the manifest exists.
                manifest = json.dumps(hashes, indent=1).encode()
                replace_file(self._hashes / f"{step}.json", manifest, is_durable=True)
        if not self._hosts.is_leader:
            return
        # After the commit, because old steps are needed until then. A failed deletion does not fail the save.
        try:
            self._delete_old()
        except Exception as e:
            logging.warning("old checkpoints not deleted before the next save: %s", reason(e))

    def _delete_old(self) -> None:
        """Deletes all but the newest steps, then manifests without a step; raises the first failure at the end."""
        failures: list[Exception] = []
        for old in sorted(int(path.name) for path in self._folder.iterdir() if path.name.isdecimal())[: -self._keep]:
            try:
                shutil.rmtree(self._folder / str(old))
            except Exception as e:
                failures.append(e)
        for old in self._hashes.glob("*.json"):
            if not (self._folder / old.stem).exists():
                old.unlink()
        if failures:
            raise failures[0]

    def _set_aside(self, step: int) -> None:
        names = (f"{self._folder.name}.damaged-{step}{again}" for again in ("", *(f".{i}" for i in range(2, 1000))))
        target = next(path for path in map(self._folder.with_name, names) if not path.exists())
        os.replace(self._folder / str(step), target)
        self._opened().reload()

    def _damage(self, step: int) -> str | None:
        manifest = self._hashes / f"{step}.json"
        if not manifest.is_file():
            # Orbax committed the step and the process was killed before hashing: no group was acknowledged.
            return "it was never hashed"
        try:
            wanted = json.loads(manifest.read_text())
        except ValueError:
            return "its hashes are unreadable"
        self._agreement.say(json.dumps({"hash": step}))
        got = self._agreement.all_hashes(self._agreement.own_hashes(self._folder / str(step)))
        differing = sorted(name for name in {*wanted, *got} if wanted.get(name) != got.get(name))
        return f"{len(differing)} files changed, {differing[0]} among them" if differing else None


def _part(abstract: Any) -> ocp.args.PyTreeRestore:
    placed = ocp.checkpoint_utils.construct_restore_args(abstract)
    return ocp.args.PyTreeRestore(item=abstract, restore_args=placed, partial_restore=True)
