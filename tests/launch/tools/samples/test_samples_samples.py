import io
import json
import re

import pytest
from rich.console import Console

from launch.tools.samples import samples_view
from launch.tools.samples.samples_view import Query, choose, pairs, parse_steps, read_samples, visible
from tests.launch.tools.report.folder import HOSTILE, make_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("samples") / "run", steps=10)


def asked(folder, **query):
    return choose(read_samples(folder), Query(**query))


def lines_of(folder):
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def test_every_line_is_read_and_a_torn_last_one_is_left_out(tmp_path):
    made = make_folder(tmp_path / "run")
    whole = read_samples(made)
    assert whole.num_responses == sum(len(row["responses"]) for row in lines_of(made)) and whole.num_unreadable == 0
    with open(made / "samples.jsonl", "a") as file:
        file.write('[1]\nnot json\n{"format": 1, "kind": 7}\n{"format": 1, "kind": "tra')
    again = read_samples(made)
    assert (again.groups, again.num_unreadable) == (whole.groups, 3)


def test_samples_of_a_newer_format_are_refused(tmp_path):
    made = make_folder(tmp_path / "run")
    row = lines_of(made)[0] | {"format": 2}
    (made / "samples.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(ValueError, match="format 2, this Sluice reads up to 1"):
        read_samples(made)


def test_an_evaluation_that_was_made_again_replaces_the_first(tmp_path):
    made = make_folder(tmp_path / "run", groups=1)
    (row,) = lines_of(made)
    again = row | {"incarnation": 1, "answer": "new"}
    (made / "samples.jsonl").write_text("".join(json.dumps(r) + "\n" for r in (row, again)))
    assert [g.answer for g in read_samples(made).groups] == ["new"]


@pytest.mark.parametrize(
    "sort, key",
    [
        ("reward", lambda r, s: r["reward"]),
        ("length", lambda r, s: r["tokens"]),
        ("step", lambda r, s: s),
        ("lag", lambda r, s: -1 if r["lag"] is None else r["lag"]),
    ],
)
def test_sort_puts_the_largest_first_and_reverse_the_smallest(folder, sort, key):
    want = sorted(key(r, row["step"]) for row in lines_of(folder) for r in row["responses"])

    def got(**query):
        found, _ = asked(folder, sort=sort, limit=10**6, **query)
        fields = ({"reward": s.response.reward, "tokens": s.response.tokens, "lag": s.response.lag} for s in found)
        return [key(r, s.group.step) for r, s in zip(fields, found, strict=True)]

    assert got() == want[::-1]
    assert got(reverse=True) == want


def test_grep_step_and_eval_leave_what_fits_and_limit_counts_it(folder):
    everything = [(row, r) for row in lines_of(folder) for r in row["responses"]]
    found, num = asked(folder, grep=re.compile("needle"), limit=3)
    text = [row["prompt"] + r.get("text", "") + "".join(t["text"] for t in r.get("turns", [])) for row, r in everything]
    assert num == sum("needle" in t for t in text) and len(found) == 3
    assert asked(folder, steps=(3, 4), limit=1)[1] == sum(3 <= row["step"] <= 4 for row, _ in everything)
    assert asked(folder, is_eval=True)[1] == sum(row["kind"] == "eval" for row, _ in everything)
    assert asked(folder, is_eval=False)[1] == sum(row["kind"] == "train" for row, _ in everything)


def test_pairs_are_the_same_problem_first_and_last_in_the_order_of_the_problems(tmp_path):
    made = make_folder(tmp_path / "run", groups=1)
    (row,) = lines_of(made)
    about = {"kind": "eval", "set": "heldout"}
    rows = [
        row | about | {"step": step, "order": order, "prompt_id": f"p{order}"} for step in (0, 5, 9) for order in (2, 1)
    ]
    rows.append(row | about | {"step": 9, "order": 3, "prompt_id": "p3"})  # asked once
    (made / "samples.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    got = pairs(read_samples(made), limit=5)
    assert [(a.group.order, a.group.step, b.group.step) for a, b in got] == [(1, 0, 9), (2, 0, 9)]


def test_pairs_are_of_one_prompt_wherever_it_stands_in_its_set(tmp_path):
    """As after a run that goes on with another file of problems, or another number of them."""
    made = make_folder(tmp_path / "run", groups=1)
    (row,) = lines_of(made)

    def evaluated(step: int, order: int, prompt_id: str) -> dict:
        return row | {"kind": "eval", "set": "h", "step": step, "order": order, "prompt_id": prompt_id}

    rows = [evaluated(0, 1, "a"), evaluated(0, 2, "b"), evaluated(9, 1, "b"), evaluated(9, 2, "c")]
    rows += [evaluated(step, order, "") for order in (5, 6) for step in (0, 9)]
    (made / "samples.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    got = pairs(read_samples(made), limit=5)
    assert [(a.group.prompt_id, a.group.step, b.group.step) for a, b in got] == [("b", 0, 9), ("", 0, 9), ("", 0, 9)]
    assert [(a.group.order, b.group.order) for a, b in got] == [(2, 1), (5, 5), (6, 6)]


def test_steps_are_one_or_a_range():
    assert parse_steps("40") == (40, 40) and parse_steps("4-6") == (4, 6)
    for odd in ("x", "6-4", "-3", "1-2-3", ""):
        with pytest.raises(ValueError, match="--step"):
            parse_steps(odd)


def test_visible_text_moves_no_cursor_and_reorders_nothing():
    assert visible("a\tb\nc") == "a\tb\nc"
    assert visible("\x1b[2J\x07\r\x00\x7f") == "␛[2J␇␍␀␡"
    assert visible("\u202eabc\ud800\x9b") == "‹U+202E›abc‹U+D800›‹U+009B›"
    assert visible("ü 漢字 🙂") == "ü 漢字 🙂"


def shown(folder, *, grep=None, full=False, limit=40, **options):
    out = io.StringIO()
    found, _ = asked(folder, limit=limit, grep=grep)
    samples_view.show(Console(file=out, width=80, highlight=False, **options), found, grep=grep, full=full)
    return out.getvalue()


CODE = re.compile("\x1b\\[[0-9;]*m|\x1b\\]8;[^\x1b]*\x1b\\\\\\\\")


def test_terminal_is_readable_on_80_columns_and_has_colours_only_there(tmp_path):
    made = make_folder(tmp_path / "run", texts=HOSTILE)
    text = shown(made, force_terminal=True)
    assert "\x1b[" in text
    plain = CODE.sub("", text)
    assert "\x1b" not in plain and "\u202e" not in plain and "\r" not in plain
    assert max(map(len, plain.split("\n"))) <= 80
    assert "x" * 70 in plain and "see --full" in plain and "[... " in plain and "</script>" in plain
    assert "\x1b" not in shown(made)


def test_pipe_gets_lines_as_they_are_however_long(tmp_path):
    made = make_folder(tmp_path / "run", texts=HOSTILE)
    lines = shown(made, full=True, limit=10**6).split("\n")
    texts = [r["text"] for row in lines_of(made) for r in row["responses"] if "text" in r]
    written = {line for text in texts for line in visible(text).split("\n")}
    assert {f"  {line}" if line else "" for line in written} <= set(lines)
    assert max(map(len, lines)) > 80 and not any(line.endswith(" ") and line.strip() == "" for line in lines)


def test_what_was_looked_for_is_marked_in_a_terminal(folder):
    marked = shown(folder, grep=re.compile("needle"), force_terminal=True, color_system="standard")
    assert "\x1b[30;43mneedle" in marked
    assert "43m" not in shown(folder, grep=re.compile("needle"))


def test_what_was_looked_for_is_shown_where_it_lies_in_what_is_left_out():
    text = "a" * 5000 + "needle" + "b" * 5000
    assert "needle" not in samples_view.shortened(text)
    short = samples_view.shortened(text, re.compile("needle"))
    assert "needle" in short and len(short) < 2700
    left_out = sum(int(n) for n in re.findall(r"\[\.\.\. (\d+) characters", short))
    assert left_out + len(re.sub(r" \[\.\.\.[^]]*\] ", "", short)) == len(text)
    lines = "\n".join(f"line {i}" for i in range(300))
    short = samples_view.shortened(lines, re.compile("line 150"))
    assert "line 150\n" in short and short.count("\n") < 55 and short.count("see --full") == 2


def test_terminal_tells_reward_advantage_lag_and_weights_of_a_response(folder):
    text = shown(folder)
    for word in ("reward", "math 1 ok", "advantage", "lag", "weights", "finish", "tokens", "answer: 12", "environment"):
        assert word in text
    assert text.count("prompt") < text.count("reward"), "a prompt that follows itself is not repeated"
