"""The plan: where every module, symbol and test goes. Reads MOVES.tsv, EXTRA.tsv and PURPOSES.tsv."""

import collections
import csv
import os
import pathlib
import subprocess

import source

HERE = pathlib.Path(__file__).parent
PLAN = pathlib.Path(os.environ["PLAN"])
PRODUCT = ("actor/", "bridge/", "configs/", "launch/", "learner/")


def table(path: pathlib.Path) -> list[list[str]]:
    rows = [line.split("\t") for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]
    return [[*row, *[""] * 6] for row in rows[1:]]


def dotted(path: str) -> str:
    return path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


class Plan:
    def __init__(self) -> None:
        tracked = subprocess.check_output(["git", "ls-files"], text=True).splitlines()
        self.files = [f for f in tracked if pathlib.Path(f).is_file() and not pathlib.Path(f).is_symlink()]
        have = set(self.files)
        self.sources = {f: source.read(f) for f in self.files if f.endswith(".py")}
        self.by_module = {s.module: s for s in self.sources.values()}
        self.target: dict[str, str | None] = {}
        self.symbols: dict[tuple[str, str], str] = {}  # (file, name): the target that it alone goes to
        self.renames: dict[tuple[str, str], str] = {}
        self.by_hand: list[str] = []
        for present, target, *_ in table(PLAN / "MOVES.tsv"):
            self.target[present] = None if target == "DELETE" else target
        tests: dict[str, str] = {}
        for kind, present, target, only_with, *_ in table(HERE / "EXTRA.tsv"):
            if only_with and only_with not in have:
                continue
            file, _, names = present.partition(":")
            if kind == "file":
                self.target[file] = None if target == "DELETE" else target
            elif kind == "symbol":
                for name in names.split(","):
                    self.symbols[file, name] = target
            elif kind == "rename":
                self.renames[file, names] = target
            elif kind == "test":
                tests[present] = target
        self.target = {f: t for f, t in self.target.items() if f in have}
        for file in self.files:
            if file.startswith(PRODUCT) and file.endswith(".py") and file not in self.target:
                self.target[file] = self._by_room(file)
                self.by_hand.append(f"new file without a rule, moved with its room: {file} -> {self.target[file]}")
        self._check_deleted()
        self._place_rooms()
        self.purposes = {row[0]: row[1] for row in table(HERE / "PURPOSES.tsv")}
        self._place_tests(tests)
        self._place_data()

    def _check_deleted(self) -> None:
        for file, target in list(self.target.items()):
            if target is None and [c for c in self.sources[file].chunks if c.names != ["__all__"]]:
                raise SystemExit(f"{file} is to be deleted, but it has code: give it a line in EXTRA.tsv")

    def _place_rooms(self) -> None:
        """Where a folder goes as a whole: by NAMES.tsv, else where its __init__ goes."""
        self.rooms: dict[str, str] = {}
        for f, t in self.target.items():
            if f.endswith("/__init__.py") and t and t.endswith("/__init__.py"):
                self.rooms[f.removesuffix("/__init__.py")] = t.removesuffix("/__init__.py")
        for kind, old, new, _, note, *_ in table(PLAN / "NAMES.tsv"):
            if kind == "module" and note.startswith("room"):
                self.rooms[old.replace(".", "/")] = new.replace(".", "/")
        for folder in {f.rpartition("/")[0] for f in self.target} - set(self.rooms):
            targets = [t for f, t in self.target.items() if t and f.rpartition("/")[0] == folder]
            if f"{folder}/__init__.py" in self.target and targets:
                self.rooms[folder] = collections.Counter(t.rpartition("/")[0] for t in targets).most_common(1)[0][0]

    def _by_room(self, file: str) -> str:
        folder, _, name = file.rpartition("/")
        if not hasattr(self, "_room_names"):
            self._room_names = {
                row[1].replace(".", "/"): row[2].replace(".", "/")
                for row in table(PLAN / "NAMES.tsv")
                if row[0] == "module" and row[4].startswith("room")
            }
        return f"{self._room_names.get(folder, folder)}/{name}"

    def _place_tests(self, given: dict[str, str]) -> None:
        """tests/<package>/<room>/test_<module>.py goes where its module goes, everything else with its room."""
        alone = collections.Counter(t for t in self.target.values() if t)
        largest = {}
        for f, t in self.target.items():
            if t and (t not in largest or len(self.sources[f].text) > len(self.sources[largest[t]].text)):
                largest[t] = f
        taken: dict[str, str] = {}
        tests = [f for f in self.files if f.startswith("tests/")]
        wanted: dict[str, str] = {}
        for file in tests:
            folder, _, name = file.rpartition("/")
            room = folder.removeprefix("tests/")
            if file in given:
                wanted[file] = given[file]
                continue
            wanted[file] = file
            if not file.startswith(PRODUCT_TESTS):
                continue
            if name == "__init__.py":
                wanted[file] = ""
                continue
            module = f"{room}/{name.removeprefix('test_')}"
            target = self.target.get(module)
            near = next((old for old in sorted(given, key=len, reverse=True) if file.startswith(old + "/")), None)
            if name.startswith("test_") and target and not target.startswith("docs/"):
                new_room, _, new_name = target.rpartition("/")
                stay = alone[target] > 1 and largest[target] != module
                wanted[file] = f"tests/{new_room}/" + (name if stay else f"test_{new_name}")
            elif near:
                wanted[file] = f"{given[near]}/{name}" if "." in name else given[near] + file.removeprefix(near)
            elif name.startswith("test_") and (by_name := self._longest_prefix(room, name)):
                wanted[file] = f"tests/{by_name.rpartition('/')[0]}/{name}"
            elif room in self.rooms:
                wanted[file] = f"tests/{self.rooms[room]}/{name}"
        for file in sorted(wanted, key=lambda f: (wanted[f] != f, f)):
            new = wanted[file]
            if new and new in taken:
                folder, _, name = new.rpartition("/")
                old_room = file.rpartition("/")[0].rpartition("/")[2]
                stem = file.rpartition("/")[2].removeprefix("test_")
                new = f"{folder}/test_{old_room}_{stem}" if name.startswith("test_") else f"{folder}/{old_room}_{stem}"
                if name == "conftest.py" or new in taken:
                    self.by_hand.append(f"no free name for {file} (wanted {wanted[file]})")
                    raise SystemExit(self.by_hand[-1])
            if new:
                taken[new] = file
            if file.endswith(".py"):
                self.target[file] = new or None
            elif new != file:
                self.moved_data[file] = new
        folders = {n.rpartition("/")[0] for n in taken if n.endswith(".py")}
        self.new_inits = set()
        for folder in folders:
            while folder and folder != "tests":
                if f"{folder}/__init__.py" not in taken and not folder.startswith(("tests/bench", "tests/integration")):
                    self.new_inits.add(f"{folder}/__init__.py")
                folder = folder.rpartition("/")[0]
        for init in list(self.new_inits):  # a package of tests that stays keeps its file
            if init in self.target and self.target[init] is None:
                self.target[init] = init
                self.new_inits.discard(init)
        for f, t in list(self.target.items()):
            if f.startswith("tests/") and f.endswith("__init__.py") and t is None and f in taken:
                self.target[f] = f

    def _longest_prefix(self, room: str, name: str) -> str | None:
        words = name.removeprefix("test_").removesuffix(".py").split("_")
        for n in range(len(words) - 1, 0, -1):
            if target := self.target.get(f"{room}/{'_'.join(words[:n])}.py"):
                return target
        return None

    moved_data: dict[str, str] = {}

    def _place_data(self) -> None:
        for file in self.files:
            if file.endswith(".py") or not file.startswith(PRODUCT):
                continue
            for old, new in DATA.items():
                if file.startswith(old):
                    self.moved_data[file] = new + file.removeprefix(old)


PRODUCT_TESTS = tuple(f"tests/{p}" for p in PRODUCT)
DATA = {
    "configs/environments/textarena_games.json": "configs/tasks/textarena_games.json",
    # Data lies beside the module that reads it, so that setuptools finds it and its code stays as it is.
    "launch/report/page/": "launch/tools/report/",
    "launch/deploy/slurm/": "launch/tools/deploy/",
    "launch/deploy/sandbox_seccomp.json": "launch/tools/deploy/sandbox_seccomp.json",
}
