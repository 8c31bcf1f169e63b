"""The recipes for accelerators in the planner: `python -m tests.bench.planner.recipes`.

What it is told is computed, not measured: an H100 by its memory's and its matmuls' rates, the learner's slice by the
FLOPs of a step at an assumed utilization (`launch/tools/compile_tpu/estimate.py`), weights and store as on the clusters
page (`docs/cluster_profile.json`), lengths by assumption. Writes a profile for each recipe into `docs/plan_profiles/`,
and the table of `docs/recipes.md`.
"""

import dataclasses
import json
import re
from typing import Any

from configs import overrides
from configs.model_sizes import MODEL_SIZES
from configs.presets.tpu import CASES, SliceCase
from configs.schema import Config
from launch.tools.compile_tpu.estimate import micro_batch_flops, micro_batch_lengths, seconds
from launch.tools.plan import profile as plan_profile
from launch.tools.plan.sim.event_queue import SimResult
from launch.tools.plan.sim.simulate import default_warmup, simulate
from learner.metrics.flops import matmul_params
from learner.model.architecture import Architecture
from tests.bench.harness.runs import PROJECT

HBM_BYTES, HBM_BYTES_PER_S, FLOPS = 80e9, 3.35e12, 989e12
"""An H100 SXM's, by its data sheet; dense bfloat16."""
HBM_SHARE, FLOPS_SHARE, HOST_S = 0.7, 0.5, 0.003
"""Assumed: what decoding gets of the memory's rate, and prompts of the matmuls'; of each step of the engine, what the
host takes."""
MEMORY_SHARE, SPARE_BYTES = 0.9, 4e9
"""vLLM's default of what it uses, and, assumed, what activations and graphs take of that."""
DELTA_SHARE = 1 / 145
"""Of a version's bytes, as a delta at a learning rate of 1e-6 (`results/publish.md`)."""
OPTIMIZER_S = 0.01
"""Assumed seconds of an optimizer step on the slice."""
NUM_UPDATES = 40
"""That count, as of `launch.tools.plan` by window."""
WAITS = 0.05
"""Of the learner's time: with less of it nobody says that it waits."""
FOLDER, PAGE = PROJECT / "docs" / "plan_profiles", PROJECT / "docs" / "recipes.md"
COLUMNS = (
    *("Recipe", "Engines", "Seconds per step", "Waiting ratio"),
    *("Lag: mean, max", "Groups dropped", "What waits"),
)
HEAD = f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}"
PUBLISHES = {"publish.serve": "https"}
"""Beside the recipe: GPUs and slice are different machines."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Assumed:
    """Of a recipe: how many tokens its prompts and responses have, and how many engines there are."""

    median: float
    sigma: float
    prompt_tokens: tuple[int, int]
    num_engines: tuple[int, int]
    """So few that the learner waits, and enough of them; the profile has the latter."""
    remat: str
    """The policy that `model.remat=auto` chose when the recipe was compiled for its slice."""


ASSUMED = {
    "gsm8k_qwen2_5_1_5b": Assumed(
        median=220, sigma=0.5, prompt_tokens=(80, 250), num_engines=(1, 2), remat="attention"
    ),
    "countdown_qwen2_5_3b": Assumed(
        median=350, sigma=0.7, prompt_tokens=(90, 130), num_engines=(1, 2), remat="attention"
    ),
    "deepscaler_qwen3_4b": Assumed(median=2500, sigma=0.8, prompt_tokens=(60, 400), num_engines=(16, 32), remat="dots"),
}


def config_of(recipe: str) -> Config:
    """The recipe, served to other machines."""
    return overrides.apply(overrides.load_preset(case_of(recipe).config_path), PUBLISHES)


def case_of(recipe: str) -> SliceCase:
    """Its slice and its model."""
    (case,) = [one for one in CASES if one.preset == recipe]
    return case


def profile_of(recipe: str) -> dict[str, Any]:
    """As `launch.tools.plan` takes it."""
    case, config, assumed = case_of(recipe), config_of(recipe), ASSUMED[recipe]
    model = Architecture.from_hf(MODEL_SIZES[case.model])
    embedding = model.vocab_size * model.hidden_size
    num_params = matmul_params(model) + embedding * (1 if model.tie_word_embeddings else 2)
    cache_bytes = 2 * 2 * model.num_layers * model.num_kv_heads * model.head_dim
    cluster = json.loads((PROJECT / "docs" / "cluster_profile.json").read_text())
    lengths = {"kind": "lognormal", "median": assumed.median, "sigma": assumed.sigma, "prompt_share": 0.5}
    lengths["max_tokens"] = config.sampling.max_response_tokens
    low, high = assumed.prompt_tokens
    context = (low + high) / 2 + assumed.median / 2
    running = sorted({1, 8, 32, 64, 128, config.actor.max_num_seqs})
    step_s = [
        HOST_S
        + max(
            (2 * num_params + h * context * cache_bytes) / (HBM_SHARE * HBM_BYTES_PER_S),
            2 * num_params * h / (FLOPS_SHARE * FLOPS),
        )
        for h in running
    ]
    _, computed, _ = micro_batch_flops(config, model, assumed.remat)
    learner_s = seconds(computed, num_chips=1, family=case.topology.partition(":")[0])
    return {
        "engine": {
            "running": running,
            "tokens_per_s": [round(h / s) for h, s in zip(running, step_s, strict=True)],
            "max_num_seqs": config.actor.max_num_seqs,
            "kv_capacity_tokens": int((MEMORY_SHARE * HBM_BYTES - SPARE_BYTES - 2 * num_params) / cache_bytes),
            "prefill_s_per_token": _digits(2 * num_params / (FLOPS_SHARE * FLOPS)),
        },
        "response_tokens": lengths,
        "prompt_tokens": {"kind": "uniform", "min_tokens": low, "max_tokens": high},
        "learner": {
            "seconds_per_token": _digits(learner_s / micro_batch_lengths(config)[0]),
            "optimizer_step_s": OPTIMIZER_S,
        },
        "publish": cluster["publish"],
        "num_engines": assumed.num_engines[-1],
        "num_learner_chips": config.mesh.num_devices,
        "store": cluster["store"],
        "network": cluster["network"]
        | {"weights_bytes": 2 * num_params, "delta_bytes": round(2 * num_params * DELTA_SHARE)},
    }


def _digits(value: float) -> float:
    return float(f"{value:.3g}")


def plan(recipe: str, num_engines: int) -> SimResult:
    """As `launch.tools.plan` simulates it."""
    config = config_of(recipe)
    profile = plan_profile.from_dict(profile_of(recipe) | {"num_engines": num_engines})
    return simulate(config, profile, num_updates=NUM_UPDATES, warmup_updates=default_warmup(config), seed=0)


def row(recipe: str, num_engines: int, outcome: SimResult) -> str:
    """A line of the table."""
    waiting, lag = outcome.round_mean("waiting_ratio"), outcome.token_lag
    dropped = sum(outcome.num_dropped.values())
    cells = [
        f"`{recipe}`",
        str(num_engines),
        f"{outcome.step_s:.1f}",
        f"{waiting:.2f}",
        f"{lag.mean:.1f}, {lag.max}",
        str(dropped),
        "the learner" if waiting > WAITS else "neither" if not dropped else "the engines' groups",
    ]
    return f"| {' | '.join(cells)} |"


def table() -> str:
    """All of it, in markdown."""
    return "\n".join([HEAD, *(row(r, n, plan(r, n)) for r, one in ASSUMED.items() for n in one.num_engines)])


def write_profiles() -> None:
    """One for each recipe."""
    FOLDER.mkdir(exist_ok=True)
    for recipe in ASSUMED:
        (FOLDER / f"{recipe}.json").write_text(json.dumps(profile_of(recipe), indent=1) + "\n")


def main() -> None:
    """Writes profiles and table."""
    write_profiles()
    made = table()
    print(made)
    text, found = re.subn(re.escape(HEAD) + r"(\n\|.*)*", lambda _: made, PAGE.read_text())
    if found != 1:
        raise ValueError(f"{PAGE} has {found} tables that begin with {HEAD!r}, wanted one")
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
