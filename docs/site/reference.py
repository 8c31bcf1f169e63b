"""Reference pages: config fields, metrics, and the modules that users call or extend."""

from collections.abc import Iterator, Mapping

from configs.field_docs import FieldDoc, field_docs
from configs.tasks import textarena
from configs.tasks.catalog import ROWS
from learner.metrics.metric_names import FAMILIES, METRICS

API: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "configs": (
        "Configuration",
        ("configs.schema", "configs.overrides", "configs.custom_functions", "configs.run_folder"),
    ),
    "presets": ("Presets and recipes", ("configs.presets.sizes", "configs.presets.rolloutpipe", "configs.presets")),
    "losses": ("Losses", ("learner.objective.losses",)),
    "advantages": ("Advantages", ("learner.objective.advantages",)),
    "objective": (
        "Reward shaping",
        ("learner.objective.reward_shaping",),
    ),
    "types": ("Wire types", ("bridge.rollout_types", "bridge.weight_types")),
    "store": ("Store", ("bridge.store.sql.learner_side", "bridge.store.sql.actor_side", "bridge.store.open")),
    "snapshots": (
        "Snapshots",
        ("bridge.snapshots.snapshot_writer", "bridge.snapshots.verified_copy", "bridge.snapshots.bucket"),
    ),
    "verifiers": ("Verifiers", ("actor.rewards.types", "actor.rewards.registry", "actor.rewards.verifier_pool")),
    "environments": ("Environments", ("actor.environments.protocol", "actor.environments.tool_parsers")),
    "rewards": ("Rewards", ("actor.rewards.scorer", "actor.rewards.adaptive_timeout")),
    "engine": ("Engine", ("actor.engine_protocol",)),
    "families": ("Model families", ("learner.model.families.family", "learner.model.architecture")),
    "trackers": ("Trackers", ("learner.metrics.trackers", "learner.metrics.tracker_kinds")),
    "evaluation": ("Evaluation", ("learner.evaluation.estimators", "learner.evaluation.eval_summary")),
}
"""Title and modules of each API page."""

FIELDS = "fields.md"
METRICS_PAGE = "metrics.md"
ENVIRONMENTS = "environments.md"


def api() -> dict[str, tuple[str, str]]:
    """Returns title and Markdown of each API page by its name; mkdocstrings inserts the docstrings."""
    return {name: (title, _modules(title, modules)) for name, (title, modules) in API.items()}


def fields() -> str:
    """Returns the page of all config fields by section."""
    parts = [
        "# Config fields\n\nSet a field with `--config.FIELD=VALUE` or in a preset. Defaults are those of "
        "`configs/sections/`; a preset may differ.\n"
    ]
    section = None
    for doc in field_docs().values():
        if (own := doc.path.rpartition(".")[0]) != section:
            section = own
            parts.append(f"\n## {section or 'config'}\n\n| Field | Default | Type | Meaning |\n|---|---|---|---|")
        parts.append(_field(doc))
    return "\n".join(parts) + "\n"


def metrics() -> str:
    """Returns the page of all metrics with their units."""
    rows = [f"| `{name}` | {_cell(meaning)} |" for name, meaning in (METRICS | FAMILIES).items()]
    head = (
        "# Metrics\n\nThe names in `metrics.jsonl`, TensorBoard and every tracker. `*` stands for the name "
        "of a verifier, an evaluation set or a source.\n\n| Metric | Unit and meaning |\n|---|---|"
    )
    return "\n".join([head, *rows]) + "\n"


def environments() -> str:
    """Returns the page of all environments, with the TextArena games as tested."""
    games = textarena.tried_games()
    playable = {game: found for game, found in games.items() if not found["problem"]}
    parts = [
        "# Environment catalog\n\nValues of `prompts.environment`. How to use them is in "
        "[Environments and tools](../environments.md).\n",
        "## Environments with generated rows\n\n| Name | Module |\n|---|---|",
        *(f"| `{name}` | `{rows.__module__}` |" for name, rows in sorted(ROWS.items())),
        f"\n## Playable TextArena games\n\n{len(playable)} of {len(games)} game ids, from "
        "`configs/tasks/textarena_games.json`. `Players` is the smallest number that the game accepts.\n\n"
        "| Game | Players |\n|---|---|",
        *(f"| `{game}` | {found['num_players']} |" for game, found in playable.items()),
        "\n## TextArena games that cannot be played\n\n| Game | Reason |\n|---|---|",
        *(f"| `{game}` | {_cell(str(found['problem']))} |" for game, found in games.items() if found["problem"]),
    ]
    return "\n".join(parts) + "\n"


def _modules(title: str, modules: tuple[str, ...]) -> str:
    def parts() -> Iterator[str]:
        yield f"# {title}\n"
        for module in modules:
            yield f"## `{module}`\n\n::: {module}\n    options:\n      heading_level: 3\n"

    return "\n".join(parts())


def _field(doc: FieldDoc) -> str:
    value = str(doc.default).lower() if isinstance(doc.default, bool) else str(doc.default)
    default = "" if doc.default is None or doc.default == "" else f"`{_cell(value)}`"
    kind = ", ".join(f"`{_cell(one)}`" for one in doc.kind.split("|") if one.strip())
    name = doc.path.rpartition(".")[2]
    anchor = f'<span id="{doc.path}"></span>'
    return f"| {anchor}`{name}` | {default} | {kind} | {_cell(doc.meaning)} |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
