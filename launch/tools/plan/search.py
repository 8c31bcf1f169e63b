"""Search over splits of a chip budget, engines of different sizes, and windows, within a lag bound."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from configs.schema import Config
from launch.tools.plan.frontier import chosen_width
from launch.tools.plan.profile import Profile
from launch.tools.plan.sim.event_queue import SimResult
from launch.tools.plan.sim.simulate import default_warmup, simulate

_ALPHAS = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0)
_WIDTHS_IN_UPDATES = (1, 2, 4, 8)
_SPLITS = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """Point of the search."""

    num_engines: int
    chips_per_engine: int
    num_learner_chips: int
    max_num_seqs: int
    async_ratio: float | None
    """Async ratio of a window. None means that `width` is used."""
    width: int
    """Width in groups. 0 for fifo, or if `async_ratio` is set."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchResult:
    """A choice and its simulated outcome."""

    choice: Choice
    outcome: SimResult
    within_bound: bool
    """True if no group was trained at a higher lag than allowed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grid:
    """Values to try; empty tuples select defaults that fit the config."""

    num_chips: int
    engines: tuple[int, ...] = ()
    async_ratios: tuple[float, ...] = ()
    widths: tuple[int, ...] = ()
    max_num_seqs: tuple[int, ...] = ()

    def choices(self, config: Config, profile: Profile) -> Iterator[Choice]:
        """Yields all choices.

        Raises ValueError if the chip budget cannot be split, or a list does not match the config's admission policy.
        """
        policy = config.admission.policy
        if profile.num_learner_chips == 0:
            raise ValueError(
                "--search splits chips between engines and learner, but this profile's learner has no chips of "
                "its own (num_learner_chips=0)"
            )
        if self.async_ratios and policy != "window":
            raise ValueError(f"--search_alpha requires admission.policy=window, got {policy}")
        if self.widths and policy == "fifo":
            raise ValueError("--search_width has no effect with admission.policy=fifo; remove it")
        if self.widths and self.async_ratios:
            raise ValueError("--search_width and --search_alpha both set a window's width; set one of them")
        sizes = profile.sizes()
        self._check(sizes)
        for chips_per_engine, of_size in sizes.items():
            for num_engines, num_seqs in itertools.product(self._splits(chips_per_engine), self._num_seqs(of_size)):
                engine = dataclasses.replace(of_size.engine, max_num_seqs=num_seqs)
                hardware = dataclasses.replace(of_size, engine=engine, num_engines=num_engines)
                for async_ratio, width in self._windows(config, hardware):
                    yield Choice(
                        num_engines=num_engines,
                        chips_per_engine=chips_per_engine,
                        num_learner_chips=self.num_chips - num_engines * chips_per_engine,
                        max_num_seqs=num_seqs,
                        async_ratio=async_ratio,
                        width=width,
                    )

    def _check(self, sizes: Mapping[int, Profile]) -> None:
        """Raises ValueError for a value that no size of engine can have."""
        smallest = min(sizes)
        most = self._max_engines(smallest)
        if most < 1:
            raise ValueError(f"--chips={self.num_chips} is too few: one engine needs {smallest}, the learner 1")
        for n in self.engines:
            if not 1 <= n <= most:
                raise ValueError(f"--search_engines: expected 1 to {most} (of {self.num_chips} chips), got {n}")
        most = max(of_size.engine.max_num_seqs for of_size in sizes.values())
        for n in self.max_num_seqs:
            if not 1 <= n <= most:
                raise ValueError(f"--search_max_num_seqs: expected 1 to {most}, the profile's max_num_seqs, got {n}")

    def _max_engines(self, chips_per_engine: int) -> int:
        return (self.num_chips - 1) // chips_per_engine

    def _splits(self, chips_per_engine: int) -> Sequence[int]:
        most = self._max_engines(chips_per_engine)
        if self.engines or not most:
            return [n for n in self.engines if n <= most]
        return sorted({max(1, round(most * i / _SPLITS)) for i in range(1, _SPLITS + 1)})

    def _num_seqs(self, of_size: Profile) -> Sequence[int]:
        most = of_size.engine.max_num_seqs
        if self.max_num_seqs:
            return [n for n in self.max_num_seqs if n <= most]
        return sorted({max(1, most // 4), max(1, most // 2), most})

    def _windows(self, config: Config, hardware: Profile) -> Sequence[tuple[float | None, int]]:
        """Returns pairs (async ratio, width), with the width that a run chooses on this hardware."""
        policy, per_update = config.admission.policy, config.rounds.groups_per_update
        if policy == "fifo":
            return [(None, 0)]
        if self.widths:
            return [(None, w) for w in self.widths]
        if policy == "window":
            return [(a, 0) for a in self._ratios(config)]
        widths = {chosen_width(config, hardware), *(n * per_update for n in _WIDTHS_IN_UPDATES)}
        return [(None, width) for width in sorted(widths) if width <= config.rounds.groups_per_round]

    def _ratios(self, config: Config) -> Sequence[float]:
        # Tickets are issued at most rounds.max_lag_steps updates ahead, so a higher ratio has no effect. A ratio below
        # the lag of the newest weights right before a publish is invalid.
        bound = math.inf if config.rounds.max_lag_steps is None else config.rounds.max_lag_steps
        for ratio in self.async_ratios:
            if ratio > bound:
                raise ValueError(
                    f"--search_alpha: {ratio:g} is above rounds.max_lag_steps={bound}, which bounds it already"
                )
        least = config.publish.every_n_steps - 1
        return self.async_ratios or [a for a in _ALPHAS if least <= math.ceil(a) and a <= bound] or [float(least)]


def apply(config: Config, profile: Profile, choice: Choice) -> tuple[Config, Profile]:
    """Returns the config and profile of a choice."""
    is_default = not choice.width and choice.async_ratio is None
    admission = dataclasses.replace(
        config.admission,
        width=choice.width or "auto",
        async_ratio=choice.async_ratio,
        sequences=config.admission.sequences if is_default else 0,  # H follows from the other fields
    )
    of_size = profile.sizes()[choice.chips_per_engine]
    engine = dataclasses.replace(of_size.engine, max_num_seqs=choice.max_num_seqs)
    changed = dataclasses.replace(
        of_size, engine=engine, num_engines=choice.num_engines, num_learner_chips=choice.num_learner_chips
    )
    return dataclasses.replace(config, admission=admission), changed


def search(
    config: Config,
    profile: Profile,
    grid: Grid,
    *,
    max_lag: int | None,
    num_updates: int,
    warmup_updates: int | None = None,
    seed: int = 0,
    on_tried: Callable[[SearchResult], None] = lambda tried: None,
) -> list[SearchResult]:
    """Simulates all choices and returns them ranked.

    Choices within the lag bound come first, by decreasing response tokens/s (`SimResult.tokens_per_s`) and then
    increasing lag. The other choices follow by increasing lag. `warmup_updates` None selects the default per choice
    (`simulate.default_warmup`), because wider windows take longer to fill. Raises ValueError if a grid value does not
    match the config or profile.
    """
    tried = []
    for choice in grid.choices(config, profile):
        of_choice, hardware = apply(config, profile, choice)
        warmup = default_warmup(of_choice) if warmup_updates is None else warmup_updates
        outcome = simulate(of_choice, hardware, num_updates=num_updates, warmup_updates=warmup, seed=seed)
        within = max_lag is None or outcome.group_lag.max <= max_lag
        tried.append(SearchResult(choice=choice, outcome=outcome, within_bound=within))
        on_tried(tried[-1])
    return sorted(tried, key=_rank)


def _rank(tried: SearchResult) -> tuple[int, float, float]:
    # A lag over the bound ranks below any lag within it. Speeds are compared to four digits, so smaller differences are
    # ties.
    over = 0 if tried.within_bound else 1 + tried.outcome.group_lag.max
    return (over, -float(f"{tried.outcome.tokens_per_s:.4g}"), tried.outcome.token_lag.mean)
