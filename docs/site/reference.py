"""Reference pages: fields of the configuration, metrics, and the modules that people call or extend."""

from collections.abc import Iterator, Mapping

from configs.field_docs import FieldDoc, field_docs
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
        "Around the loss",
        ("learner.objective.reward_shaping",),
    ),
    "types": ("What travels", ("bridge.rollout_types", "bridge.weight_types")),
    "store": ("The store", ("bridge.store.sql.learner_side", "bridge.store.sql.actor_side", "bridge.store.open")),
    "snapshots": (
        "Snapshots",
        ("bridge.snapshots.snapshot_writer", "bridge.snapshots.verified_copy", "bridge.snapshots.bucket"),
    ),
    "verifiers": ("Verifiers", ("actor.rewards.types", "actor.rewards.registry", "actor.rewards.verifier_pool")),
    "environments": ("Environments", ("actor.environments.protocol", "actor.environments.tool_parsers")),
    "rewards": ("Rewards", ("actor.rewards.scorer", "actor.rewards.adaptive_timeout")),
    "engine": ("The engine", ("actor.engine_protocol",)),
    "families": ("Model families", ("learner.model.families.family", "learner.model.architecture")),
    "trackers": ("Trackers", ("learner.metrics.trackers",)),
    "evaluation": ("Evaluation", ("learner.evaluation.estimators", "learner.evaluation.eval_summary")),
}
"""A page each: its title, and the modules whose public names it has."""

FIELDS = "fields.md"
METRICS_PAGE = "metrics.md"


def api() -> dict[str, tuple[str, str]]:
    """Title and Markdown of each page of the API, by its name; mkdocstrings puts in what the sources say."""
    return {name: (title, _modules(title, modules)) for name, (title, modules) in API.items()}


def fields() -> str:
    """Every field of the configuration, a section after the other."""
    parts = [
        "# Fields\n\nSet by `--config.FIELD=VALUE`, or in a preset. Defaults are those of the sections in "
        "`configs/sections/`, before any preset.\n"
    ]
    section = None
    for doc in field_docs().values():
        if (own := doc.path.rpartition(".")[0]) != section:
            section = own
            parts.append(f"\n## {section or 'config'}\n\n| field | default | type | meaning |\n|---|---|---|---|")
        parts.append(_field(doc))
    return "\n".join(parts) + "\n"


def metrics() -> str:
    """Every metric with its unit."""
    rows = [f"| `{name}` | {_cell(meaning)} |" for name, meaning in (METRICS | FAMILIES).items()]
    head = (
        "# Metrics\n\nThe names in `metrics.jsonl`, TensorBoard and every tracker. A star stands for a name: "
        "a verifier's, an evaluation set's, a source's.\n\n| metric | unit and meaning |\n|---|---|"
    )
    return "\n".join([head, *rows]) + "\n"


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
