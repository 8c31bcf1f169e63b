"""Which runs there are: every preset, some with other seeds, and losses beside each other on one schedule."""

import dataclasses
from collections.abc import Mapping

import configs.presets


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One run of the main job at tiny size."""

    name: str
    preset: str
    seed: int = 0
    """Of the training problems; the held-out ones are the same."""
    overrides: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Fields of the configuration and their values, as on the command line."""

    @property
    def arguments(self) -> dict[str, object]:
        """Of `tests.bench.job.run_job`."""
        return {"run.seed": self.seed, **self.overrides}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """Runs held against others: the differences of their held-out rewards at the end, pair by pair."""

    name: str
    pairs: tuple[tuple[str, str], ...]
    """(case, the one it is held against)."""
    about: str


def preset_names() -> list[str]:
    """Every preset that comes in sizes."""
    return sorted(configs.presets.PRESETS)


PRESETS = tuple(preset_names())
SEEDS = (0, 1, 2)
"""Of the presets whose accuracy is compared; 0 is every preset's own run."""
RACES = ("serial", "rollpacker")
"""RollPacker's Figure 8: tail batching loses no accuracy against synchronous training."""
DECAYING = {"optimizer.learning_rate": "4e-4", "optimizer.schedule": "linear"}
"""The step sizes of the presets in flight: a short round's prompts are others than a long round's, and a policy that
moves far with each of them swings."""

WINDOW = {"publish.every_n_steps": "4"}
"""pipelinerl with four updates a published version: the policy moves away from the one that its data was sampled by,
and the proximal policy is another one than either."""
EPOCHS = {"rounds.epochs": "2"}
"""pipelinerl with two passes over each batch: the second begins where the first one's step has gone."""
DECOUPLED, TIS = {"loss.name": "decoupled_ppo"}, {"loss.name": "tis", "loss.max_weight": "2.0"}
PUBLISHED = {"loss.proximal": "published"}
LOSSES: Mapping[str, Mapping[str, str]] = {
    "window_truncated_is": WINDOW,
    "window_decoupled_ppo": WINDOW | DECOUPLED | PUBLISHED,
    "window_tis": WINDOW | TIS | PUBLISHED,
    "epochs_truncated_is": EPOCHS,
    "epochs_decoupled_ppo": EPOCHS | DECOUPLED,
}
"""Losses on one schedule, by case; pipelinerl's own is truncated_is with c = 5, which decoupled_ppo keeps."""


def seeded(name: str, seed: int) -> str:
    """A case's name; the first seed has none in it."""
    return f"{name}_seed_{seed}" if seed else name


CASES: Mapping[str, Case] = {
    case.name: case
    for case in [
        *(Case(name=p, preset=p) for p in PRESETS),
        *(Case(name=seeded(p, seed), preset=p, seed=seed) for seed in SEEDS[1:] for p in RACES),
        *(
            Case(name=seeded(f"{p}_decaying", seed), preset=p, seed=seed, overrides=DECAYING)
            for p in RACES
            for seed in SEEDS
        ),
        *(Case(name=name, preset="pipelinerl", overrides=overrides) for name, overrides in LOSSES.items()),
    ]
}
COMPARISONS = (
    *(
        Comparison(
            name=f"{race}_minus_serial",
            pairs=tuple((seeded(race, seed), seeded(other, seed)) for seed in SEEDS),
            about=f"{about} against synchronous training, seed by seed",
        )
        for race, other, about in (
            ("rollpacker", "serial", "tail batching"),
            ("rollpacker_decaying", "serial_decaying", "with a step size that decays, both: tail batching"),
        )
    ),
    *(
        Comparison(
            name=f"{case}_minus_truncated_is",
            pairs=((case, f"{case.partition('_')[0]}_truncated_is"),),
            about=f"{LOSSES[case]['loss.name']} against truncated_is on the same schedule",
        )
        for case in LOSSES
        if not case.endswith("truncated_is")
    ),
)
