"""Which faults a campaign injects, and in which order: drawn from a seed, so that one campaign can be repeated."""

import dataclasses
import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Literal

Kind = Literal[
    "kill",
    "stop",
    "leave",
    "resize",
    "partition",
    "slow link",
    "full disk",
    "corrupt checkpoint",
    "corrupt chunk",
    "clock jump",
]
Phase = Literal[
    "generating",
    "emitting",
    "prefetching",
    "swapping",
    "handing over",
    "accumulating",
    "applying",
    "publishing",
    "saving",
    "restoring",
]
OF_ACTORS: tuple[Phase, ...] = ("generating", "emitting", "prefetching", "swapping")
HANDOVER: Phase = "handing over"
"""Of an actor that was told to leave."""
OF_LEARNERS: tuple[Phase, ...] = ("accumulating", "applying", "publishing", "saving", "restoring")
Lane = Literal["learner", "small", "vllm", "store", "world"]
"""Lanes run side by side, each its own faults one after the other: what a learner needs to come back, an actor is hit
meanwhile."""
LANES: tuple[Lane, ...] = ("learner", "small", "vllm", "store", "world")
STORE, ENGINE, SERVER, CHECKPOINT, RUN = "store", "engine", "snapshot server", "checkpoint", "run folder"
SMALL, VLLM = ("a", "b"), "v"
"""Actors with the small engine, and the one with vLLM."""
MOMENTS: dict[Phase, tuple[str, ...]] = {
    "generating": ("middle",),
    "emitting": ("begin", "end"),
    "handing over": ("begin", "end"),
    "accumulating": ("begin", "end"),
    "applying": ("begin", "end"),
}
"""Where a gate is in each phase; elsewhere there are three."""
_ALL_MOMENTS = ("begin", "middle", "end")
_WITH_A_START_S = (18.0, 24.0)
"""How long the disk of the run's folder is full: the learner that ends of it finds it so at its next start too, where
the machine is not slow."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault, and the moment at which it is injected."""

    lane: Lane
    kind: Kind
    target: str
    """A process (learner-0, a, ...), ENGINE, SERVER and its host's number, STORE, CHECKPOINT, RUN, or both ends of a
    link: `a-store`."""
    held: str
    """The process whose gate says that the phase has come."""
    phase: Phase
    moment: str
    seconds: float
    """How long what does not end a process lasts; of a clock, how far it jumps."""


def draw(seed: int, *, num_learners: int, has_vllm: bool) -> list[Fault]:
    """A campaign's faults: every kind of every target in every phase that it has, in random order.

    The moments in a phase, the durations and which of equal actors is meant are drawn too.
    """
    source = random.Random(seed)
    faults = list(_all(source, num_learners, has_vllm))
    source.shuffle(faults)
    return faults


def few(seed: int) -> list[Fault]:
    """Some of each lane, and each kind but a resize and a corrupt checkpoint, to see whether it all works; no vLLM."""
    all_ = draw(seed, num_learners=1, has_vllm=False)
    wanted: tuple[tuple[Lane, Kind, Phase], ...] = (
        ("learner", "kill", "applying"),
        ("small", "kill", "emitting"),
        ("small", "leave", "generating"),
        ("small", "kill", "handing over"),
        ("small", "stop", "swapping"),
        ("store", "kill", "saving"),
        ("world", "corrupt chunk", "prefetching"),
        ("world", "full disk", "applying"),
        ("store", "partition", "accumulating"),
        ("world", "partition", "prefetching"),
        ("world", "slow link", "prefetching"),
        ("world", "clock jump", "generating"),
    )
    return [next(f for f in all_ if (f.lane, f.kind, f.phase) == one) for one in wanted]


def _all(source: random.Random, num_learners: int, has_vllm: bool) -> Iterator[Fault]:
    ends: tuple[Kind, ...] = ("kill", "stop")
    small = itertools.cycle(source.sample(SMALL, len(SMALL)))
    for index, kind, phase in itertools.product(range(num_learners), ends, OF_LEARNERS):
        yield _fault(source, "learner", kind, f"learner-{index}", f"learner-{index}", phase)
    for kind, phase in itertools.product(ends, OF_ACTORS):
        actor = next(small)
        yield _fault(source, "small", kind, actor, actor, phase)
        if has_vllm:
            yield _fault(source, "vllm", kind, VLLM, VLLM, phase)
    moves: tuple[Kind, ...] = ("leave", "resize")
    for kind in moves:
        for phase in ("generating", "emitting", "swapping"):
            actor = next(small)
            yield _fault(source, "small", kind, actor, actor, phase)
        if has_vllm:
            yield _fault(source, "vllm", kind, VLLM, VLLM, "generating")
    for kind in ends:
        actor = next(small)
        yield _fault(source, "small", kind, actor, actor, HANDOVER)
        if has_vllm:
            for phase in ("generating", "swapping"):
                yield _fault(source, "vllm", kind, ENGINE, VLLM, phase)
        host = source.randrange(num_learners)
        yield _fault(source, "world", kind, f"{SERVER} {host}", next(small), "prefetching")
        yield _fault(source, "world", kind, f"{SERVER} {host}", f"learner-{host}", "publishing")
    yield from _of_the_store(source, small)
    yield from _of_links(source, small)
    yield from _of_disks_and_clocks(source, small)


def _of_the_store(source: random.Random, small: Iterator[str]) -> Iterator[Fault]:
    kills: Sequence[Phase] = ("generating", "emitting", "accumulating", "applying", "publishing", "saving", "restoring")
    stops: Sequence[Phase] = ("emitting", "publishing", "saving")
    kinds: tuple[tuple[Kind, Sequence[Phase]], ...] = (("kill", kills), ("stop", stops))
    for kind, phases in kinds:
        for phase in phases:
            yield _fault(source, "store", kind, STORE, next(small) if phase in OF_ACTORS else "learner-0", phase)


def _of_links(source: random.Random, small: Iterator[str]) -> Iterator[Fault]:
    cuts: Sequence[tuple[str, Phase]] = (
        ("store", "generating"),
        ("store", "emitting"),
        ("learner", "prefetching"),
        ("learner", "swapping"),
    )
    for other, phase in cuts:
        actor = next(small)
        yield _fault(source, "world", "partition", f"{actor}-{other}", actor, phase)
    of_learner: Sequence[Phase] = ("accumulating", "publishing", "saving", "restoring")
    for phase in of_learner:
        yield _fault(source, "store", "partition", "learner-store", "learner-0", phase)
    slow: Sequence[tuple[str, Phase]] = (("learner", "prefetching"), ("store", "emitting"))
    for other, phase in slow:
        actor = next(small)
        yield _fault(source, "world", "slow link", f"{actor}-{other}", actor, phase)


def _of_disks_and_clocks(source: random.Random, small: Iterator[str]) -> Iterator[Fault]:
    actor = next(small)
    yield _fault(source, "world", "full disk", "learner-0", "learner-0", "saving", moment="begin")
    of_run: Sequence[Phase] = ("accumulating", "applying")
    for phase in of_run:
        full = _fault(source, "world", "full disk", RUN, "learner-0", phase, moment="begin")
        yield dataclasses.replace(full, seconds=round(source.uniform(*_WITH_A_START_S), 1))
    yield _fault(source, "world", "full disk", actor, actor, "prefetching", moment="begin")
    yield _fault(source, "store", "full disk", STORE, next(small), "emitting", moment="begin")
    yield _fault(source, "learner", "corrupt checkpoint", CHECKPOINT, "learner-0", "restoring", moment="begin")
    actor = next(small)
    yield _fault(source, "world", "corrupt chunk", actor, actor, "prefetching", moment="middle")
    jumps: Sequence[tuple[str, Phase]] = ((next(small), "generating"), ("learner-0", "accumulating"))
    for held, phase in jumps:
        jump_s = source.choice((-1, 1)) * source.uniform(600, 7200)
        yield dataclasses.replace(_fault(source, "world", "clock jump", held, held, phase), seconds=round(jump_s))


def _fault(
    source: random.Random, lane: Lane, kind: Kind, target: str, held: str, phase: Phase, *, moment: str = ""
) -> Fault:
    drawn = source.choice(MOMENTS.get(phase, _ALL_MOMENTS))
    seconds = round(source.uniform(2.0, 6.0), 1)
    return Fault(lane=lane, kind=kind, target=target, held=held, phase=phase, moment=moment or drawn, seconds=seconds)
