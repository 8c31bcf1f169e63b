"""How each fault is done to a site, while the process that it waits for stands still in its phase."""

import asyncio
import errno
import json
import os
import pathlib
import random
import signal
from collections.abc import Awaitable, Callable

from bridge.files import replace_file
from configs.run_folder import RunFolder
from launch.supervision import process_tree
from tests.integration.faults.kept import command_line
from tests.integration.faults.schedule import CHECKPOINT, ENGINE, RUN, SERVER, STORE, Fault, Kind, Lane, Phase
from tests.integration.faults.site import Site

SLOW_BYTES_PER_S = 60_000
_LEAST_BYTES = 4096
_OF_A_START: dict[Lane, tuple[Phase, ...]] = {
    "learner": ("restoring",),
    "vllm": ("prefetching", "swapping", "generating"),
}
"""An engine takes most of a minute to load, and after its first tokens as long again until its groups are trained."""
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "leave": signal.SIGTERM}
_SIZES = (16, 32)
"""Of an engine, in turns."""


class NotThereError(RuntimeError):
    """What was to be hit is not there."""


async def inject(site: Site, fault: Fault) -> None:
    """Does it, lets the held process go on, and waits until a fault that passes by itself has passed.

    NotThereError if there is nothing to hit.
    """
    try:
        await _WAYS[fault.kind](site, fault)
    finally:
        site.gates.open(fault.held)


async def _signal(site: Site, fault: Fault) -> None:
    number = _SIGNALS[fault.kind]
    if fault.target == STORE:
        await _signal_store(site, fault, number)
        return
    os.kill(_pid(site, fault), number)


async def _resize(site: Site, fault: Fault) -> None:
    """An operator asks for another engine."""
    file = site.limits_file(fault.target)
    size = json.loads(file.read_text())["max_num_seqs"] if file.exists() else _SIZES[-1]
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_file(file, json.dumps({"max_num_seqs": _SIZES[1 - _SIZES.index(size)]}).encode())


async def _signal_store(site: Site, fault: Fault, number: signal.Signals) -> None:
    """Its machine loses power and is there again after a while, or stands still for a while."""
    site.store.signal(number)
    site.gates.open(fault.held)
    await asyncio.sleep(fault.seconds)
    if number is signal.SIGSTOP:
        site.store.signal(signal.SIGCONT)
    await site.start_store()


async def _cut(site: Site, fault: Fault) -> None:
    ends = fault.target.split("-")
    site.where.net.cut(*ends)
    try:
        await _pass(site, fault)
    finally:
        site.where.net.heal(*ends)


async def _slow(site: Site, fault: Fault) -> None:
    ends = fault.target.split("-")
    site.where.net.limit(*ends, rate_bytes_per_s=SLOW_BYTES_PER_S)
    try:
        await _pass(site, fault)
    finally:
        site.where.net.limit(*ends)


async def _fill(site: Site, fault: Fault) -> None:
    filler = fill_up(site.disks["learner" if fault.target.startswith("learner") else fault.target])
    site.is_run_disk_full |= fault.target == RUN
    try:
        await _pass(site, fault)
    finally:
        filler.unlink()
        site.is_run_disk_full &= fault.target != RUN
        await site.start_store()  # a server whose log of transactions finds no room ends


async def _corrupt_checkpoint(site: Site, fault: Fault) -> None:
    """A bit of the newest checkpoint turns while no learner runs; the next one, which stands before it, reads that."""
    steps = intact_steps(site)
    if len(steps) < 2:
        raise NotThereError("there is no older checkpoint")
    newest = RunFolder(site.folder).checkpoints / str(steps[-1])
    file = max((f for f in newest.rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)
    flip(file, random.Random(steps[-1]))


def intact_steps(site: Site) -> list[int]:
    """Steps of which there is a checkpoint, hashes and all; the newest is the last."""
    hashes = RunFolder(site.folder).checkpoints.resolve().with_name("checkpoints.hashes")
    return sorted(int(f.stem) for f in hashes.glob("*.json"))


async def _corrupt_chunk(site: Site, fault: Fault) -> None:
    site.gates.open(fault.held, "corrupt")


async def _shift_clock(site: Site, fault: Fault) -> None:
    site.gates.open(fault.held, f"clock {fault.seconds}")


async def _pass(site: Site, fault: Fault) -> None:
    site.gates.open(fault.held)
    await asyncio.sleep(fault.seconds)


_WAYS: dict[Kind, Callable[[Site, Fault], Awaitable[None]]] = {
    "kill": _signal,
    "stop": _signal,
    "leave": _signal,
    "resize": _resize,
    "partition": _cut,
    "slow link": _slow,
    "full disk": _fill,
    "corrupt checkpoint": _corrupt_checkpoint,
    "corrupt chunk": _corrupt_chunk,
    "clock jump": _shift_clock,
}


def fill_up(folder: pathlib.Path) -> pathlib.Path:
    """Fills a folder's file system while others write to it; returns the file that does."""
    filler = folder / "filler"
    with open(filler, "wb") as file:
        size, part = 0, _free_bytes(folder)
        while part >= _LEAST_BYTES:
            try:
                os.posix_fallocate(file.fileno(), size, part)
            except OSError as e:
                if e.errno != errno.ENOSPC:
                    raise
                part = min(part // 2, _free_bytes(folder))
            else:
                size, part = size + part, _free_bytes(folder)
    return filler


def _free_bytes(folder: pathlib.Path) -> int:
    stat = os.statvfs(folder)
    return stat.f_bavail * stat.f_frsize


def flip(file: pathlib.Path, source: random.Random) -> None:
    """Turns one bit."""
    data = bytearray(file.read_bytes())
    data[source.randrange(len(data))] ^= 1 << source.randrange(8)
    file.write_bytes(data)


def _pid(site: Site, fault: Fault) -> int:
    if is_server(fault):
        host = int(fault.target.removeprefix(SERVER))
        return _below(site.learners[host].pid, "launch.services.snapshot_server")
    if fault.target == ENGINE:
        return _below(site.process(fault.held).pid, "EngineCore")
    return site.process(fault.target).pid


def _below(pid: int, word: str) -> int:
    for one in sorted(process_tree.descendants(pid)):
        if word in command_line(one):
            return one
    raise NotThereError(f"no {word} below process {pid}")


def ends_a_process(fault: Fault) -> bool:
    """Whether a process of the run has to be started again after it."""
    ends = ("kill", "stop", "leave", "resize", "corrupt checkpoint")
    return fault.kind in ends and fault.target != STORE and not is_server(fault)


def is_server(fault: Fault) -> bool:
    """Whether it hits what serves a host's rows."""
    return fault.target.startswith(SERVER)


def comes_with_a_start(fault: Fault) -> bool:
    """Whether its phase comes when what the fault before it in its lane has ended starts again."""
    return fault.phase in _OF_A_START.get(fault.lane, ())


def needs_a_new_learner(fault: Fault) -> bool:
    """Whether its phase comes only when a learner starts."""
    return fault.phase == "restoring" or fault.target == CHECKPOINT
