"""`python -m launch.tools.plan --config=PRESET --profile=FILE.json [--search]`: simulates a run in virtual time.

Runs the real round planner, arrival policy and admission code over simulated engines and a simulated learner. The
profile describes the hardware and the workload. Prints step time, waiting ratios, lag and utilization. With --search it
tries splits of a chip budget, async ratios, widths and engine sizes, and ranks them within a lag bound.

It also prints load and capacity of each resource (engines, learner, store, links), the first bottleneck, and how to fix
it.
"""

import contextlib
import dataclasses
import json

from absl import flags
from rich.console import Console

from configs.race_capacity import check_race_capacity
from configs.schema import Config
from launch import cli
from launch.startup import prepare_run
from launch.terminal import WaitMessages, make_console
from launch.tools.out_file import check_out_file
from launch.tools.plan import closed_formulas
from launch.tools.plan import profile as plan_profile
from launch.tools.plan.control_plane.capacity import ClusterModel, bottleneck
from launch.tools.plan.frontier import width_line, with_width
from launch.tools.plan.plan_tables import as_json as cluster_json
from launch.tools.plan.plan_tables import (
    closed_formula_lines,
    helpers_line,
    outcome_table,
    parts_table,
    plot_search,
    publish_lines,
    search_table,
    verdict,
)
from launch.tools.plan.profile import Profile
from launch.tools.plan.search import Choice, Grid, search
from launch.tools.plan.sim.event_queue import SimResult
from launch.tools.plan.sim.simulate import default_warmup, simulate

_PROFILE = flags.DEFINE_string("profile", None, "JSON profile of hardware and workload (docs/planning.md).")
_UPDATES = flags.DEFINE_integer(
    "updates", 0, "Optimizer steps to measure. 0 means four rounds, or 40 steps in window mode."
)
_WARMUP = flags.DEFINE_integer(
    "warmup",
    -1,
    "Optimizer steps before the measured ones. -1 means one round, or twice the width in window mode (with --search "
    "per choice).",
)
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the lengths.")
_JSON = flags.DEFINE_string("json", None, "JSON file for the numbers.")
_SEARCH = flags.DEFINE_bool("search", False, "Search the split of --chips, the async ratio or width, and max_num_seqs.")
_CHIPS = flags.DEFINE_integer("chips", 0, "With --search: total chips of engines and learner. 0 means the profile's.")
_MAX_LAG = flags.DEFINE_integer("max_lag", None, "With --search: maximum lag at which a group may be trained.")
_ENGINES = flags.DEFINE_list("search_engines", [], "With --search: numbers of engines to try.")
_ALPHA = flags.DEFINE_list("search_alpha", [], "With --search: async ratios to try.")
_WIDTH = flags.DEFINE_list("search_width", [], "With --search: widths of the window or frontier to try, in groups.")
_NUM_SEQS = flags.DEFINE_list("search_max_num_seqs", [], "With --search: values of max_num_seqs to try.")
_TOP = flags.DEFINE_integer("top", 15, "With --search: number of rows to print.")
_PLOT = flags.DEFINE_string("plot", None, "With --search: plot file (.png, .svg or .pdf).")
SHARED_FLAGS = ("config", "print_config")
"""Shared flags that this command accepts."""
_ONLY_WITH_SEARCH = (
    "chips",
    "max_lag",
    "search_engines",
    "search_alpha",
    "search_width",
    "search_max_num_seqs",
    "plot",
)


def main() -> int:
    """Simulates or searches."""
    with cli.usage_errors():
        if _PROFILE.value is None:
            raise ValueError("set --profile=FILE.json (docs/planning.md)")
        given = [name for name in _ONLY_WITH_SEARCH if flags.FLAGS[name].present]
        if given and not _SEARCH.value:
            raise ValueError(f"--{given[0]} requires --search")
        if _PLOT.value:
            check_out_file(_PLOT.value, flag="--plot", suffixes=(".png", ".svg", ".pdf"))
        config = prepare_run.config()
        profile = plan_profile.load(_PROFILE.value)
        console = make_console()
        if _SEARCH.value:
            _search(config, profile, console)
        else:
            _simulate(config, profile, console)
    return 0


def _simulate(config: Config, profile: Profile, console: Console) -> None:
    warmup = _WARMUP.value if _WARMUP.value >= 0 else default_warmup(config)
    outcome = simulate(config, profile, num_updates=_num_updates(config), warmup_updates=warmup, seed=_SEED.value)
    title = f"{config.preset}: {profile.num_engines} engines, {profile.num_learner_chips} learner chips"
    console.print(outcome_table(outcome, title=title))
    cluster = ClusterModel.of(with_width(config, profile), profile)
    # Groups of the mean size, because dropped groups are longer than average.
    pace = outcome.tokens_per_s / cluster.workload.num_samples / cluster.workload.response_tokens
    limit = bottleneck(cluster)
    console.print(parts_table(cluster.parts(pace), groups_per_s=pace))
    for line in [*publish_lines(cluster), *verdict(cluster, limit, groups_per_s=pace)]:
        console.print(line, soft_wrap=True, highlight=False)
    if profile.store is None or profile.network is None:
        without = " and ".join(n for n in ("store", "network") if getattr(profile, n) is None)
        console.print(f"profile without {without}: its cost counts as 0 (docs/planning.md)")
    if shortage := check_race_capacity(
        config, num_engines=profile.num_engines, max_num_seqs=profile.engine.max_num_seqs
    ):
        console.print(f"warning: {shortage}")
    if line := width_line(config, profile):
        console.print(line, soft_wrap=True, highlight=False)
    if profile.helpers is not None and profile.num_learner_chips:
        alone = dataclasses.replace(profile, helpers=None)
        without = simulate(config, alone, num_updates=_num_updates(config), warmup_updates=warmup, seed=_SEED.value)
        console.print(helpers_line(outcome, without), soft_wrap=True, highlight=False)
    _write(as_json(outcome) | cluster_json(cluster, limit, groups_per_s=pace))


def _search(config: Config, profile: Profile, console: Console) -> None:
    grid = Grid(
        num_chips=_CHIPS.value or profile.num_chips,
        engines=_numbers("search_engines", _ENGINES.value, int),
        async_ratios=_numbers("search_alpha", _ALPHA.value, float),
        widths=_numbers("search_width", _WIDTH.value, int),
        max_num_seqs=_numbers("search_max_num_seqs", _NUM_SEQS.value, int),
    )
    heartbeat = contextlib.nullcontext() if console.is_terminal else WaitMessages(console.print, "searching")
    with console.status("searching") as status, heartbeat:
        found = search(
            config,
            profile,
            grid,
            max_lag=_MAX_LAG.value,
            num_updates=_num_updates(config),
            warmup_updates=_WARMUP.value if _WARMUP.value >= 0 else None,
            seed=_SEED.value,
            on_tried=lambda t: status.update(f"tried {t.choice}"),
        )
    console.print(search_table(found, limit=_TOP.value, max_lag=_MAX_LAG.value))
    if _MAX_LAG.value is not None and config.admission.policy == "window":
        batch_size = config.rounds.groups_per_update * config.rounds.samples_per_group
        system = closed_formulas.of_profile(profile, num_chips=grid.num_chips, batch_size=batch_size)
        for line in closed_formula_lines(system, max_lag=_MAX_LAG.value):
            console.print(line, soft_wrap=True, highlight=False)
    if not found[0].within_bound:
        console.print(f"no choice keeps every group's lag within {_MAX_LAG.value}; sorted by lag, ascending")
    if _PLOT.value:
        plot_search(found, _PLOT.value, max_lag=_MAX_LAG.value)
        console.print(f"wrote {_PLOT.value}")
    _write([as_json(t.outcome, t.choice) | {"within_bound": t.within_bound} for t in found])


def as_json(outcome: SimResult, choice: Choice | None = None) -> dict:
    """Returns the result as JSON-serializable data."""
    data = dataclasses.asdict(outcome)
    return data if choice is None else {"choice": dataclasses.asdict(choice)} | data


def _num_updates(config) -> int:
    if _UPDATES.value < 0:
        raise ValueError(f"--updates must be >= 0, got {_UPDATES.value}")
    if _UPDATES.value:
        return _UPDATES.value
    if config.publish.when == "round_end":
        return 4 * config.rounds.groups_per_round // config.rounds.groups_per_update
    return 40


def _numbers(name: str, texts: list[str], kind: type) -> tuple:
    try:
        return tuple(kind(text) for text in texts)
    except ValueError as e:
        raise ValueError(f"--{name}: expected a list such as 1,2,4, got {','.join(texts)!r}") from e


def _write(data: object) -> None:
    if _JSON.value:
        with open(_JSON.value, "w") as file:
            json.dump(data, file, indent=2)
