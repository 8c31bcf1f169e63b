#!/usr/bin/env python3
"""Turns a clean checkout of Sluice into the target tree of MOVES.tsv. Run it in the root of the checkout.

usage: apply_moves.py [--no-format]   moves, merges, rewrites imports and texts; then patches.py; then ruff
Prints what it decided by itself and what is left by hand.
"""

import os
import pathlib
import subprocess
import sys

import contracts
import merge
import patches
import texts
from moves import Plan


def git(*arguments: str) -> None:
    subprocess.run(["git", *arguments], check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    if subprocess.check_output(["git", "status", "--porcelain", "--untracked-files=no"], text=True).strip():
        raise SystemExit("the checkout is not clean")
    plan = Plan()
    merger = merge.Merger(plan)
    new: dict[str, str] = {}
    for target in sorted(merger.parts):
        merger.rewrite(target)
    for target in sorted(merger.parts):
        new[target] = merger.text(target)
    rewriter = texts.Texts(plan, merger)
    for target in new:
        largest = max(merger.parts[target], key=lambda p: p.size).file
        new[target] = rewriter.python(new[target], largest, target)
    others = {f: rewriter.other(f) for f in plan.files if not f.endswith(".py") and f not in plan.moved_data}
    moved_text = {new_f: rewriter.other(old) for old, new_f in plan.moved_data.items()}
    move_files(plan, merger, new)
    for target, text in new.items():
        write(target, text)
    for file, text in (others | moved_text).items():
        if text is not None:
            write(file, text)
    for init in sorted(plan.new_inits | missing_inits(new)):
        if not pathlib.Path(init).exists():
            write(init, patches.ROOMS.get(init, ""))
            git("add", init)
    notes = [*plan.by_hand, *merger.notes, *rewriter.notes, *patches.apply(plan), *contracts.apply()]
    if "--no-format" not in sys.argv:
        ruff = ".venv/bin/ruff"
        subprocess.run([ruff, "check", "-q", "--fix", "--select", "I,F401,F811", "."], check=False)
        subprocess.run([ruff, "format", "-q", "."], check=True)
    git("add", "-A")
    print("\n".join(dict.fromkeys(notes)))


def write(file: str, text: str) -> None:
    pathlib.Path(file).parent.mkdir(parents=True, exist_ok=True)
    pathlib.Path(file).write_text(text)


def missing_inits(new: dict[str, str]) -> set[str]:
    """Product folders without an __init__: folders that several rooms became, or that are new."""
    made = set()
    for target in new:
        folder = os.path.dirname(target)
        while folder and not folder.startswith(("tests", "docs")):
            if f"{folder}/__init__.py" not in new:
                made.add(f"{folder}/__init__.py")
            folder = os.path.dirname(folder)
    return made


def move_files(plan: Plan, merger: merge.Merger, new: dict[str, str]) -> None:
    """Renames by git: the largest source of a target keeps its history; the others are removed."""
    renames: dict[str, str] = dict(plan.moved_data)
    for target, parts in merger.parts.items():
        if target in [p.file for p in parts if p.size * 3 > max(q.size for q in parts)]:
            continue
        for part in sorted(parts, key=lambda p: -p.size):
            if plan.target.get(part.file, part.file) == target and part.file not in renames:
                if part.file != target:
                    renames[part.file] = target
                break
    gone = [f for f in plan.sources if f not in renames and f not in new]
    for old in renames:
        git("mv", old, old + ".moving")
    if gone:
        git("rm", "-q", *gone)
    for old, target in renames.items():
        pathlib.Path(target).parent.mkdir(parents=True, exist_ok=True)
        if pathlib.Path(target).exists():
            git("rm", "-qf", old + ".moving")
        else:
            git("mv", old + ".moving", target)


if __name__ == "__main__":
    main()
