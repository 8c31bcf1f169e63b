"""The import contracts of the target tree, in pyproject.toml; layers name only modules that are there."""

import pathlib
import re

LAYERS = {
    "bridge-layers": (
        "bridge",
        "bridge: store and snapshots apart, over the wire format, over its types, over files",
        [
            "(store) | (snapshots)",
            "(object_store) | (codec)",
            "(weight_types) | (text_tokens) | (thinking)",
            "(chat_template) | (liveness) | (rollout_types) | (timeline) | (param_names)",
            "(credentials) | (template_files) | (template_language) | (validation) | (files) | (code_tests)",
        ],
    ),
    "snapshots-layers": (
        "bridge.snapshots",
        "snapshots: remote and writer over copies and deltas, over the format",
        [
            "(remote) | (snapshot_writer)",
            "(bucket) | (verified_copy) | (delta)",
            "(snapshot_format)",
            "(rounding) | (shard_map)",
            "(shared_memory)",
        ],
    ),
    "store-layers": (
        "bridge.store",
        "store: administration over opening, over the engines, over SQL, over the protocol",
        [
            "(admin)",
            "(open)",
            "(sqlite_database) | (postgres)",
            "(sql)",
            "(group_blobs)",
            "(claim) | (protocol) | (sqlite_clock) | (url_login)",
        ],
    ),
    "actor-layers": (
        "actor",
        "actor: weight updates and resizing over background tasks, over the loop, over serving, over its rooms",
        [
            "elastic_control | weight_updates",
            "background",
            "loop",
            "serving",
            "responses | sampling",
            "elastic | environments | leases | rewards | vllm | weights",
            "admission | engine_protocol | notifier | sandbox | turn_text",
        ],
    ),
    "learner-layers": (
        "learner",
        "the learner's rooms import downwards",
        [
            "(train)",
            "(run) | (follower) | (step_books)",
            "(restore) | (replicate) | (parity)",
            "(policy_trainer)",
            "(publish) : (evaluation) : (run_context)",
            "(schedule)",
            "(update)",
            "(metrics)",
            "(model)",
            "(checkpoint) | (heartbeat)",
            "(data) | (objective) | (distributed)",
        ],
    ),
    "launch-layers": (
        "launch",
        "launch: commands and what they start over the command line",
        [
            "scripts : local : learner : actor : ray : tools : console : supervision : services : startup",
            "cli",
            "cli_help | open_files | terminal",
        ],
    ),
}
TOOLS = '''[[tool.importlinter.contracts]]
id = "tools-apart"
name = "nothing imports the tools, but what ends a run: it shows samples and the report's address"
type = "forbidden"
source_modules = [
    "launch.actor", "launch.cli", "launch.console", "launch.learner", "launch.local", "launch.ray", "launch.services",
    "launch.startup", "launch.supervision",
]
forbidden_modules = ["launch.tools"]
allow_indirect_imports = true
ignore_imports = ["launch.console.finalize -> launch.tools.**"]
unmatched_ignore_imports_alerting = "none"
'''


def apply() -> list[str]:
    path = pathlib.Path("pyproject.toml")
    head, *blocks = re.split(r"(?=^\[\[tool\.importlinter\.contracts\]\])", path.read_text(), flags=re.MULTILINE)
    notes, made, seen = [], [], set()
    for block in blocks:
        name = re.search(r'^id = "([\w-]+)"', block, re.MULTILINE)[1]
        comment = re.search(r"(\n#[^\n]*\n)*\Z", block)
        if name in LAYERS:
            block = _layers(name) + ("\n" + comment.group().strip("\n") + "\n" if comment.group().strip() else "\n")
            seen.add(name)
        made.append(block.rstrip("\n") + "\n\n" if not block.rstrip().splitlines()[-1].startswith("#") else block.rstrip("\n") + "\n")
        if name == "bridge-layers":
            made += [_layers("snapshots-layers") + "\n", _layers("store-layers") + "\n"]
        if name == "tools":
            made += [_layers("launch-layers") + "\n", TOOLS]
    notes += [f"BY HAND pyproject.toml: no contract {n}" for n in set(LAYERS) - seen - {"snapshots-layers", "store-layers", "launch-layers"}]
    path.write_text(head + "".join(made))
    return notes


def _layers(name: str) -> str:
    container, title, layers = LAYERS[name]
    folder = pathlib.Path(container.replace(".", "/"))
    have = {f.stem for f in folder.glob("*.py")} | {f.parent.name for f in folder.glob("*/__init__.py")}
    named = {n for layer in layers for n in re.findall(r"\w+", layer)}
    rows = []
    for layer in layers:
        separator = " : " if " : " in layer else " | "
        left = [part for part in re.split(r" [:|] ", layer) if part.strip("()") in have]
        if left:
            rows.append(f'    "{separator.join(left)}",')
    for more in sorted(have - named - {"__init__", "__main__"}):
        rows.append(f'    "{more}",  # a new module: give it its layer')
    return "\n".join(
        [
            "[[tool.importlinter.contracts]]",
            f'id = "{name}"',
            f'name = "{title}"',
            'type = "layers"',
            f'containers = ["{container}"]',
            "layers = [",
            *rows,
            "]",
            "exhaustive = true  # a new module is given its layer here",
            "",
        ]
    )
