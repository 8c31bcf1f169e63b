"""The planner's input: what the hardware and the workload are like. Plain JSON, read strictly."""

import dataclasses
import json
import math
import os
import pathlib
import typing
from typing import Any

import msgspec

from launch.plan.cluster.profile import NetworkProfile, StoreProfile
from launch.plan.engine_profile import EngineProfile
from launch.plan.episode_profile import EpisodeProfile
from launch.plan.length_profile import LengthProfile


def _not_negative(section: str, node: Any) -> None:
    for field in dataclasses.fields(node):
        value = getattr(node, field.name)
        if not 0 <= value < math.inf:
            raise ValueError(f"{section}.{field.name} must be finite and >= 0, got {value}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnerProfile:
    """What training costs."""

    seconds_per_token: float
    """Of one chip, for a token of prompt or response: forward, backward, and what else grows with the tokens."""
    micro_batch_s: float = 0.0
    """Of each micro-batch, whatever it holds and however many chips there are."""
    micro_batch_tokens: int = 0
    """Tokens that a micro-batch holds; 0: packing.rows x packing.row_tokens."""
    optimizer_step_s: float = 0.0

    def __post_init__(self) -> None:
        """Checks the signs."""
        _not_negative("learner", self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublishProfile:
    """What new weights cost."""

    export_s: float = 0.0
    """The learner, which stands still meanwhile."""
    prefetch_s: float = 0.0
    """From the announcement to the pause: noticing it, copy, check; the engine generates meanwhile. What a network
    takes (`Profile.network`) comes on top."""
    pause_s: float = 0.0
    """Generation stands still."""

    def __post_init__(self) -> None:
        """Checks the signs."""
        _not_negative("publish", self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Profile:
    """All that the planner wants to know beside a config."""

    engine: EngineProfile
    response_tokens: LengthProfile
    prompt_tokens: LengthProfile
    learner: LearnerProfile
    publish: PublishProfile = PublishProfile()
    num_engines: int = 1
    chips_per_engine: int = 1
    num_learner_chips: int = 1
    """0: the learner has none of its own and trains on the engines'. All of them are its own when a round's rollout has
    ended; with rounds.train_start=group_ready half of them from some point in the round on (`launch/plan/chips.py`)."""
    verifier_s: float = 0.0
    """From a group's last response to its place in the store."""
    claim_s: float = 0.0
    """From a ticket's issue to an actor that looks for it."""
    zero_variance_groups: float = 0.0
    """Share of the groups whose rewards are all equal; it matters with rounds.filter_zero_variance."""
    episodes: EpisodeProfile | None = None
    """None: a response is one turn, without an environment."""
    store: StoreProfile | None = None
    """None: it costs nothing and takes everything."""
    network: NetworkProfile | None = None
    """None: what publish says of new weights is all there is to them, however many hosts there are."""

    def __post_init__(self) -> None:
        """Checks the counts."""
        for name, least in (("num_engines", 1), ("chips_per_engine", 1), ("num_learner_chips", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be >= {least}, got {getattr(self, name)}")
        if self.verifier_s < 0 or self.claim_s < 0:
            raise ValueError(f"verifier_s and claim_s must be >= 0, got {self.verifier_s} and {self.claim_s}")
        if not 0 <= self.zero_variance_groups < 1:
            raise ValueError(f"zero_variance_groups must be in [0, 1), got {self.zero_variance_groups}")

    @property
    def num_chips(self) -> int:
        """Of engines and learner together."""
        return self.num_engines * self.chips_per_engine + self.num_learner_chips


def from_dict(raw: Any) -> Profile:
    """Builds a profile from plain data.

    Raises:
      ValueError: a field is missing, unknown or of another type; it is named.
    """
    _refuse_unknown(raw, Profile, "profile")
    try:
        return msgspec.convert(raw, Profile)
    except msgspec.ValidationError as e:
        raise ValueError(f"profile: {e}".replace("`$.", "`")) from e


def to_dict(profile: Profile) -> dict[str, Any]:
    """Plain data that `from_dict` reads back."""
    return dataclasses.asdict(profile)


def load(path: str | os.PathLike[str]) -> Profile:
    """Reads a JSON file.

    Raises:
      ValueError: it isn't there, is no JSON or no profile.
    """
    try:
        raw = json.loads(pathlib.Path(path).read_text())
    except FileNotFoundError as e:
        raise ValueError(f"there is no profile {str(path)!r}; launch/README.md shows what one holds") from e
    except (json.JSONDecodeError, UnicodeDecodeError) as e:
        raise ValueError(f"{path} is no JSON: {e}") from e
    try:
        return from_dict(raw)
    except ValueError as e:
        raise ValueError(f"{path}: {e}") from e


def _refuse_unknown(raw: Any, kind: Any, path: str) -> None:
    if not isinstance(raw, dict):
        raise ValueError(f"{path} must be a JSON object, got {type(raw).__name__}")
    fields = {f.name: f.type for f in dataclasses.fields(kind)}
    for name, value in raw.items():
        if name not in fields:
            raise ValueError(f"{path} has no field {name!r}; it has {', '.join(fields)}")
        for part in (fields[name], *typing.get_args(fields[name])):  # also of `Part | None`
            if dataclasses.is_dataclass(part) and value is not None:
                _refuse_unknown(value, part, name)
