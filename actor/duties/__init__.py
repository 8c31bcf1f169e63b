"""What an actor does beside its loop, one coroutine a duty; it changes the actor by its methods, never its fields."""

from actor.duties.changes import follow_store
from actor.duties.leases import follow_withdrawals, keep_leases
from actor.duties.signs import beat, watch
from actor.duties.weights import follow_weights
from actor.loop import Duty

STANDARD_DUTIES: tuple[Duty, ...] = (follow_store, follow_weights, keep_leases, beat, watch, follow_withdrawals)
"""The duties of every actor. One that is started again for another engine also has `resizing.follow_limits`."""
