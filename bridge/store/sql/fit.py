"""Whether a group answers its ticket, as one value that a database compares."""

import blake3
import msgspec

from bridge.types import Group, Ticket


def fit_of(value: Ticket | Group) -> str:
    """A digest of what a group has in common with its ticket: kind, round, order, K and the prompt; hex."""
    num_samples = value.num_samples if isinstance(value, Ticket) else len(value.rollouts)
    head = [value.kind, int(value.round), int(value.order), num_samples]  # numpy's integers as Python's
    prompt = value.prompt_tokens.astype("<i4", copy=False).tobytes()
    return blake3.blake3(msgspec.msgpack.encode([*head, prompt])).hexdigest(length=16)


def describe_misfit(ticket: Ticket, group: Group) -> str:
    """Why a group does not fit its ticket, in words."""
    want = (ticket.kind, ticket.round, ticket.order, ticket.num_samples)
    got = (group.kind, group.round, group.order, len(group.rollouts))
    if got != want:
        why = f"(kind, round, order, rollouts) is {got}, wanted {want}"
    else:
        why = f"its prompt differs ({group.prompt_tokens.size} tokens, wanted {ticket.prompt_tokens.size})"
    return f"group {ticket.id} does not fit its ticket: {why}"
