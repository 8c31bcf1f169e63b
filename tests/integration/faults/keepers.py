"""What the product's keepers would have made of each end of a process: the campaign's own starts all again, for ever.

The codes are written down here from the documentation (docs/run_folder.md "Exit codes"; docs/kubernetes.md
"Failures"; docs/slurm_ray.md), not taken from the code. Every keeper restarts what a signal
ended (a negative code).
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence

from tests.integration.faults.evidence import End

SUPERVISOR, KUBERNETES, SLURM = "launch.local and launch.ray", "Kubernetes", "Slurm"
STOPPED, BUSY, RESIZE = 3, 4, 75
_CODES = frozenset(range(256))
NOT_FOR_A_LEARNER: Mapping[str, frozenset[int]] = {
    SUPERVISOR: _CODES - {0, STOPPED, BUSY},
    KUBERNETES: frozenset({2, 5}),
    SLURM: frozenset({2, 5}),
}
"""Codes after which a keeper does not start a learner again, by keeper; 0 is apart (`_done_too_soon`)."""
NOT_FOR_AN_ACTOR: Mapping[str, frozenset[int]] = {
    SUPERVISOR: frozenset({2}),
    KUBERNETES: frozenset(),
    SLURM: frozenset({2}),
}
FULL_DISK = 1
"""With this code a learner ends whose disk is full. A supervisor on the spot then leaves it to who makes room, as is
documented; on a cluster, where nobody watches, it is started again and must get on when there is room."""
ON_A_CLUSTER = (KUBERNETES, SLURM)
FIRST_PAUSE_S, MAX_PAUSE_S = 2.0, 60.0
"""After an end with `BUSY` a supervisor waits, twice as long each time in a row (docs/run_folder.md "Exit codes")."""
KUBERNETES_RESTARTS = 50
"""Of a learner, over the whole run."""


def problems(ends: Mapping[str, Sequence[End]], *, max_restarts: int) -> list[str]:
    """What is to be said of the ends of each life of each process, the last ones too."""
    said: list[str] = []
    for process, own in ends.items():
        for number, end in enumerate(own[:-1], 1):
            if keepers := would_give_up(process, end):
                said.append(f"{process} ended with {end.code} (life {number}); {', '.join(keepers)} would give up")
        if (longest := longest_row(own[:-1])) > max_restarts:
            said.append(f"{process} ended {longest} times without a new step; actor.max_restarts is {max_restarts}")
        if is_learner(process) and len(own) - 1 > KUBERNETES_RESTARTS:
            said.append(f"{process} was started again {len(own) - 1} times; {KUBERNETES} does {KUBERNETES_RESTARTS}")
    return said + list(_done_too_soon({name: own for name, own in ends.items() if is_learner(name)}))


def would_give_up(process: str, end: End) -> list[str]:
    """The keepers that would not start the process again after this end."""
    codes = NOT_FOR_A_LEARNER if is_learner(process) else NOT_FOR_AN_ACTOR
    keepers = [keeper for keeper, own in codes.items() if end.code in own]
    is_expected = is_learner(process) and end.code == FULL_DISK and end.had_full_disk
    return [keeper for keeper in keepers if keeper in ON_A_CLUSTER] if is_expected else keepers


def longest_row(ends: Sequence[End]) -> int:
    """How often a process was started again, at most, without a step that the run had never reached before."""
    row = longest = 0
    for end in ends:
        row = (0 if end.had_new_step else row) + (end.code != RESIZE)
        longest = max(longest, row)
    return longest


def pause_s(ends: Sequence[End]) -> float:
    """How long a supervisor waits, after the last of a process's ends, before it starts it again."""
    if ends[-1].code != BUSY:
        return 0.0
    fruitless = itertools.takewhile(lambda end: not end.had_new_step, reversed(ends))
    row = min(len(ends), len(list(fruitless)) + 1)  # the life that had a step failed, too
    return min(FIRST_PAUSE_S * 2 ** (row - 1), MAX_PAUSE_S)


def is_learner(process: str) -> bool:
    """Whether it is one of the learner's processes, which begin and end together; else it is an actor."""
    return process.startswith("learner")


def _done_too_soon(learners: Mapping[str, Sequence[End]]) -> Iterator[str]:
    """All of a learner's processes ended with 0, which is done to every keeper, and the run was not."""
    for number, together in enumerate(zip(*learners.values(), strict=True), 1):
        is_last = number == len(next(iter(learners.values())))
        if not is_last and all(end.code == 0 for end in together):
            yield f"the learner ended with 0 (life {number}) before its run was done; no keeper would start it again"
