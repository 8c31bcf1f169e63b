"""Duties act on the actor by its methods: no duty changes one of its fields or knows what it keeps to itself."""

import ast
from pathlib import Path

import pytest

from actor import weight_updates

ROOM = Path(weight_updates.__file__).parent
FILES = [ROOM / name for name in ("background.py", "elastic_control.py", "weight_updates.py")]
PARTS = {"engine", "store", "timeline", "weights", "sampler", "fence", "turn", "sample_ended", "group_ended"}
"""What an actor was put together from, and the bells it rings; everything else of it is read only."""


def path_in_actor(node: ast.AST) -> list[str]:
    """["held", "pop"] for `actor.held.pop`, [] for what does not begin with `actor.`; subscripts are passed over."""
    names: list[str] = []
    while isinstance(node, ast.Attribute | ast.Subscript):
        if isinstance(node, ast.Attribute):
            names.insert(0, node.attr)
        node = node.value
    return names if isinstance(node, ast.Name) and node.id == "actor" else []


def trespasses(source: str) -> list[str]:
    """What a duty does to an actor's fields, as `line: what`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        names = path_in_actor(node.func if isinstance(node, ast.Call) else node)
        name = ".".join(["actor", *names])
        if isinstance(node, ast.Attribute | ast.Subscript) and names:
            if not isinstance(node.ctx, ast.Load):
                found.append(f"{node.lineno}: {name} is changed")
            elif any(n.startswith("_") for n in names):
                found.append(f"{node.lineno}: {name} is the actor's own")
        elif isinstance(node, ast.Call) and len(names) > 1 and names[0] not in PARTS:
            found.append(f"{node.lineno}: {name} is called")
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.name)
def test_duty_changes_no_field_of_the_actor(file):
    assert trespasses(file.read_text()) == []


@pytest.mark.parametrize(
    ("line", "trespass"),
    [
        ("actor.is_shutting_down = True", "actor.is_shutting_down is changed"),
        ("actor.serving.tally.num_dropped += 1", "actor.serving.tally.num_dropped is changed"),
        ("actor.admission.max_sequences = 3", "actor.admission.max_sequences is changed"),
        ("actor.held['t0'] = ticket", "actor.held is changed"),
        ("del actor.held['t0']", "actor.held is changed"),
        ("actor.held.pop('t0')", "actor.held.pop is called"),
        ("actor.admission.remove('t0')", "actor.admission.remove is called"),
        ("tasks = actor._groups", "actor._groups is the actor's own"),
    ],
)
def test_trespass_is_found(line, trespass):
    assert trespasses(f"pass\n{line}\n") == [f"2: {trespass}"]


def test_reading_and_asking_the_actor_and_its_parts_is_no_trespass():
    lines = ["x = actor.admission.waiting", "actor.forget('t0')", "actor.weights.prefetch()", "n = len(actor.held)"]
    assert trespasses("\n".join(lines)) == []
