"""Order of training under a lag bound: earliest deadline first, with places kept for what has not arrived. Pure.

A group whose oldest token is of step b can be trained by the updates b to b + L (L: the lag bound). Update b + L is its
deadline. ROLL Flash (section 4.3) trains from the smallest start step on and waits for it. Trained by arrival, quick
groups of later updates push the step on, and slow groups pass their deadlines and are generated again.

The learner waits no longer than it must: a group may overtake older ones that have not arrived as long as every update
keeps places for those that are due by then. So each open group can still be trained by its deadline, whenever it
arrives. With U groups per update, that holds if and only if, for each update d, at most as many groups are due by d as
are trained up to it. A ticket's earliest start step stands for a group that has not arrived.
"""

from collections.abc import Mapping


def num_sequences(deadline: int, coming: Mapping[int, int], *, update: int, left: int, per_update: int) -> int:
    """Returns how many groups with this deadline the update being filled can take before all earlier ones arrive.

    min over update <= d < deadline of left + (d - update) U - (groups due by d that have not arrived); `left` for a
    group that is due itself. Below 1 the group has to wait.

    Args:
      deadline: the last update that can train the group.
      coming: how many groups have not arrived, by deadline; a past deadline counts as due.
      update: number of the update being filled, which is the learner's step.
      left: groups that it still lacks.
      per_update: U.
    """
    places, total = left, left
    for last in range(update, deadline):
        due = sum(number for at, number in coming.items() if at <= last)
        places = min(places, total - due)
        total += per_update
    return places
