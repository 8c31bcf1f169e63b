"""Checkpoints: Orbax and a manifest of hashes.

One step holds all a restarted learner needs: params and optimizer state (arrays), and the host's books
(prompt iterator, open tickets, ledger; JSON). Orbax's commit is atomic, but it restores flipped bits
without a word, so every committed step's files are hashed and a step whose files no longer match is not
used. A group may be acknowledged only when the step that trained it is committed and hashed.

Over several hosts all save and restore together, into a folder that all of them see. Each hashes what it wrote itself,
the leader writes the manifest once all have, and all go by what it found (`HostAgreement`). A save that fails on one of
them fails on all; each hears of it in its own time, so Orbax, whose opening all have to join, is opened anew by the
next save alone.

A save that fails, as on a full disk, leaves nothing behind: training goes on, its groups stay in the store until a
later checkpoint has them, and only several such in a row end the run.
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

_HALF = "*.orbax-checkpoint-tmp*"
"""What Orbax writes a step into before it is whole."""


class Checkpoints:
    """A run's checkpoints. Saves in the background; one save at a time."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep: int,
        max_failed_in_a_row: int = 1,
        hosts: Processes | None = None,
    ) -> None:
        """Opens or makes the folder, and removes what saves that were killed left in it.

        Args:
          folder: of this run alone.
          keep: steps that stay.
          max_failed_in_a_row: that many saves in a row that fail are an error, fewer are logged and counted.
          hosts: all of them make one, and call its methods in the same order; this process alone if not given.

        Raises:
          ProcessLostError: the leader did not come to it.
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
        """Where Orbax's threads wait for those of the other hosts."""
        self._manager: ocp.CheckpointManager | None = None
        """Opened by all hosts together; None after a save that failed."""
        self._opened()
        self._worker = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: tuple[int, concurrent.futures.Future[None]] | None = None
        self.latest: int | None = None
        """The step that a restart goes on from, of those restored or saved by this object."""
        self.num_failed = 0
        """Saves that failed."""
        self._num_failed_in_a_row = 0
        self._failure = ""
        """What is said of the last one."""

    def save(self, step: int, arrays: Any, host: dict[str, Any]) -> None:
        """Copies the arrays off the devices, then writes them in the background.

        Raises:
          CheckpointError: too many saves in a row failed, or this step is not after the latest one.
          ProcessLostError: as `wait`.
        """
        self.wait()
        args = ocp.args.Composite(arrays=ocp.args.StandardSave(arrays), host=ocp.args.JsonSave(host))
        try:
            with self._together(step):
                manager = self._opened()
                latest = manager.latest_step()
                if latest is not None and step <= latest:  # Orbax would leave it out without a word
                    raise CheckpointError(
                        f"step {step} is not after the latest checkpoint, {latest}, of {self._folder}"
                    )
                manager.save(step, args=args)
        except (CheckpointError, ProcessLostError):
            raise
        except Exception as e:
            self._failed(step, e)
        else:
            self._pending = step, self._worker.submit(self._commit, step)

    def committed(self) -> int | None:
        """The step of a save that was committed and hashed since last asked; None if there is none.

        Raises:
          What `wait` does.
        """
        if self._pending is None or not self._pending[1].done():
            return None
        return self.wait()

    def wait(self) -> int | None:
        """Waits for the save in progress and returns its step; None if there is none, or it failed.

        Raises:
          CheckpointError: too many saves in a row failed.
          ProcessLostError: another host did not say whether its part is there.
        """
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
        """Makes sure that a step that was to be saved is there.

        Raises:
          CheckpointError: it isn't, and why.
        """
        if self.latest != step:
            raise CheckpointError(self._failure)

    def restore_latest(
        self,
        abstract: Any,
        *,
        check: Callable[[dict[str, Any]], None] = lambda host: None,
        is_part: bool = False,
    ) -> tuple[int, Any, dict[str, Any]] | None:
        """The newest intact step: (step, arrays placed like `abstract`, host books). None if there is no step.

        A step whose files do not match their hashes is reported, renamed and passed over. So is a lone first
        save that was killed before it was hashed: nothing was acknowledged yet, so starting afresh is exact.

        `check` sees the host books before any array is read, and may refuse them by raising. With `is_part` what
        `abstract` lacks of what was saved is not read.

        Raises:
          CheckpointError: there are steps, but not one is intact; nothing is renamed then.
          OSError: the disk fails.
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
        """Waits for the save in progress and lets go.

        Raises:
          CheckpointError: too many saves in a row failed.
        """
        try:
            self.wait()
        finally:
            self._worker.shutdown()
            if self._manager is not None:
                self._manager.close()

    def _opened(self) -> ocp.CheckpointManager:
        """Orbax's part; where it is not open, all hosts open it together."""
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
                # Named, they meet at the coordination service, with a deadline, from any thread; unnamed, in a
                # collective.
                active_processes=set(range(self._hosts.count)),
                # Else a host that came to no place last time would be one behind there.
                barrier_sync_key_prefix=f"checkpoints-{self._num_opened}",
            )
        return ocp.CheckpointManager(self._folder, options=options)

    def _catch_up(self) -> None:
        """Orbax numbers its saves in each process, by itself; one that began on some hosts alone is counted by all."""
        own = int(OperationIdGenerator.get_current_operation_id())
        furthest = self._agreement.largest(own)
        while int(OperationIdGenerator.get_current_operation_id()) < furthest:
            OperationIdGenerator.next_operation_id()

    @contextlib.contextmanager
    def _together(self, step: int) -> Generator[None]:
        """Around a part of a step's save that all hosts do: where one fails, all do, and nothing of the step is left.

        Raises:
          RuntimeError: another one failed; says how.
        """
        try:
            with self._agreement.on_success():
                yield
        except (CheckpointError, ProcessLostError):
            raise
        except Exception:
            self._abandon(step)
            raise

    def _abandon(self, step: int) -> None:
        """Closes Orbax's part, and removes what there is of a step once no host writes it any more; all call it."""
        if self._meeting is not None:
            self._meeting.end()
        manager, self._manager = self._manager, None
        try:
            if manager is not None:
                manager.close()
        except Exception as e:  # it raises once more what it failed with
            logging.info("checkpoint manager closed: %s", e)
        self._agreement.await_all()
        is_counted_on = (self._hashes / f"{step}.json").exists()  # else nothing does, though it may be whole
        if self._hosts.is_leader:
            for left in [*self._folder.glob(_HALF), *([] if is_counted_on else [self._folder / str(step)])]:
                shutil.rmtree(left, ignore_errors=True)

    def _newest_intact(self) -> int | None:
        """The leader's: the newest step whose files are as they were hashed; those after it are set aside.

        Raises:
          CheckpointError: there are steps, but not one is intact; nothing is renamed then.
        """
        steps = sorted(self._opened().all_steps(), reverse=True)
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
        return intact

    def _agree_on(self, intact: int | None) -> int | None:
        """The leader's step; until it is found, the others hash what they are asked to."""
        if self._hosts.is_leader:
            self._agreement.say(json.dumps({"restore": intact}))
            return intact
        while "hash" in (said := json.loads(self._agreement.say())):
            self._agreement.all_hashes(self._agreement.own_hashes(self._folder / str(said["hash"])))
        return said["restore"]

    def _failed(self, step: int, error: Exception) -> None:
        """Says so, and counts; each host in its own time, so it waits for no other.

        Raises:
          CheckpointError: too many in a row.
        """
        self.num_failed += 1
        self._num_failed_in_a_row += 1
        self._failure = f"the checkpoint of step {step} can't be saved to {self._folder}: {reason(error)}"
        in_a_row, bound = self._num_failed_in_a_row, self._max_failed_in_a_row
        if in_a_row >= bound:
            which = f" (the last {in_a_row} failed, checkpoint.max_failed_in_a_row)" if bound > 1 else ""
            raise CheckpointError(f"{self._failure}{which}") from error
        logging.error(
            "%s; make room, or mend it: training goes on from here alone, a restart from step %s, and %d more that "
            "fail end the run (checkpoint.max_failed_in_a_row)",
            self._failure,
            self.latest or 0,
            bound - in_a_row,
        )

    def _commit(self, step: int) -> None:
        folder = self._folder / str(step)
        with self._together(step):
            self._opened().wait_until_finished()
        with self._together(
            step
        ):  # what may fail is apart from what is said: else one's failure is taken for its hashes
            own = self._agreement.own_hashes(folder)
        with self._together(step):
            hashes = self._agreement.all_hashes(own)
            if self._hosts.is_leader:
                # Durable: groups are acknowledged on its account.
                manifest = json.dumps(hashes, indent=1).encode()
                replace_file(self._hashes / f"{step}.json", manifest, is_durable=True)
        if not self._hosts.is_leader:
            return
        try:  # not before the new one can be restored, and that one is saved whatever becomes of the others
            self._delete_old()
        except Exception as e:
            logging.warning("old checkpoints stay until the next save: %s", reason(e))

    def _delete_old(self) -> None:
        """Deletes all steps but the last ones, then hashes of what is not there; each failure leaves the rest to do.

        Raises:
          Exception: the first one's.
        """
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
            # Committed by Orbax, killed before hashing: nothing was acknowledged on its account.
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
