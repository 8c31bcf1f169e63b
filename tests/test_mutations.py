"""Mutants of a small source: each is another program, different in one line, and a seed draws the same ones."""

import pathlib

from tests.mutations import changes_code, draw, mutants_of, room_of

ROOT = pathlib.Path(__file__).parents[1]
SOURCE = '''"""A docstring: 1 < 2."""
import logging

LIMIT: int = 3

def cut(values, is_open=True):
    """Cuts ü."""
    logging.info("kept %d", 1)
    if "ü" not in values and not values:
        raise ValueError(f"{LIMIT + 1}")
    values.sort()
    return [v for v in values if v <= LIMIT or is_open]
'''
WANTED = {
    "LIMIT: int = 4",
    "def cut(values, is_open=False):",
    'if "ü" in values and not values:',
    'if "ü" not in values or not values:',
    'if "ü" not in values and (values):',
    "if (not ('ü' not in values and (not values))):",
    "pass",
    "return [v for v in values if v < LIMIT or is_open]",
    "return [v for v in values if v <= LIMIT and is_open]",
}


def test_mutants_of_a_source_change_one_line_each_and_leave_docstrings_and_logs_alone():
    changed = set()
    for mutant in mutants_of("a/b.py", SOURCE):
        if changes_code(mutant, SOURCE):
            lines = list(zip(SOURCE.splitlines(), mutant.apply(SOURCE).splitlines(), strict=True))
            ((_, new),) = [(old, new) for old, new in lines if old != new]
            changed.add(new.strip())
    assert changed >= WANTED
    assert not any("docstring" in line or "kept" in line for line in changed)


def test_draw_by_a_seed_is_the_same_again_and_each_line_comes_once():
    files = {"a.py": SOURCE, "b.py": SOURCE}
    first = draw(files, count=8, seed=1)
    assert first == draw(files, count=8, seed=1) != draw(files, count=8, seed=2)
    assert len({(m.file, m.line) for m in first}) == 8


def test_room_of_a_file_is_the_folder_that_mirrors_its_own():
    assert room_of("learner/schedule/group_filter.py", ROOT) == ["tests/learner/schedule"]
    assert "tests/learner/test_train.py" in room_of("learner/train.py", ROOT)
