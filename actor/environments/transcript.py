"""An episode as tokens: what was sampled, and what was observed between. It only grows. Pure."""

import dataclasses
from typing import Any

import numpy as np
from jaxtyping import Bool, Float32, Int32

from actor.engine.protocol import Sample
from bridge.types import Finish, Version


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """An episode that has ended; T tokens follow the prompt, N turns are among them."""

    tokens: Int32[np.ndarray, " T"]
    loss_mask: Bool[np.ndarray, " T"]
    """True where the policy sampled the token."""
    logprobs: Float32[np.ndarray, " T"]
    """Nats, as the engine's; 0 where nothing was sampled."""
    token_versions: tuple[Version, ...]
    """T entries: the weights behind each token; of an observed one, those of the sampled token before it (of the first
    ones: of the first sampled token), so that they decrease nowhere."""
    finish: Finish
    """stop: the environment was done. length: a budget was used up before."""
    turn_rewards: Float32[np.ndarray, " N"]
    infos: tuple[dict[str, Any], ...] = ()
    """What the environment said to people, at each of its steps."""


class Transcript:
    """An episode that goes on."""

    def __init__(self, prompt_tokens: Int32[np.ndarray, " P"]) -> None:
        """Nothing follows the prompt yet."""
        self._prompt_tokens = prompt_tokens
        self._parts: list[Sample | Int32[np.ndarray, " T"]] = []
        self._rewards: list[float] = []
        self.num_tokens = 0
        """Sampled and observed ones."""

    @property
    def num_turns(self) -> int:
        """Of the policy."""
        return sum(isinstance(part, Sample) for part in self._parts)

    @property
    def request_tokens(self) -> Int32[np.ndarray, " P+T"]:
        """The prompt and all that followed: what the engine is asked to go on with."""
        return np.concatenate([self._prompt_tokens, *map(_tokens, self._parts)])

    def observe(self, tokens: Int32[np.ndarray, " T"]) -> None:
        """Appends what the environment said."""
        self._parts.append(tokens)
        self.num_tokens += tokens.size

    def take_turn(self, sample: Sample) -> None:
        """Appends what the policy said; it has earned nothing yet."""
        self._parts.append(sample)
        self._rewards.append(0.0)
        self.num_tokens += sample.tokens.size

    def reward(self, value: float, *, before_last: bool = False) -> None:
        """Books what the last turn earned, or the one before it, if there is one."""
        if not before_last:
            self._rewards[-1] = value
        elif len(self._rewards) > 1:
            self._rewards[-2] = value

    def end(self, finish: Finish, infos: tuple[dict[str, Any], ...] = ()) -> Played:
        """The whole episode; at least one turn was taken."""
        versions: list[Version | None] = []
        for part in self._parts:
            last = versions[-1] if versions else None
            versions += part.token_versions if isinstance(part, Sample) else [last] * part.size
        first = next(v for v in versions if v is not None)
        return Played(
            tokens=np.concatenate([*map(_tokens, self._parts)]),
            loss_mask=np.concatenate([np.full(_tokens(p).size, isinstance(p, Sample)) for p in self._parts]),
            logprobs=np.concatenate(
                [p.logprobs if isinstance(p, Sample) else np.zeros(p.size, np.float32) for p in self._parts]
            ),
            token_versions=tuple(first if v is None else v for v in versions),
            finish=finish,
            turn_rewards=np.asarray(self._rewards, np.float32),
            infos=infos,
        )


def _tokens(part: Sample | Int32[np.ndarray, " T"]) -> Int32[np.ndarray, " T"]:
    return part.tokens if isinstance(part, Sample) else part
