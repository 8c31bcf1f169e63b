"""Endless training problems as grain data sets, with resumable state."""

import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import grain
from absl import logging

from configs.schema import Config
from learner.data.generated import check_bad_in_a_row
from learner.data.mixture import Curriculum, Mixture
from learner.data.open_sources import held_out_of, open_sources
from learner.data.problem import BadRow, Problem
from learner.data.row_filter import SetAside
from learner.data.source_context import OpenedSource
from learner.data.tokenizer import Tokenizer

_NO_PREFETCH = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)


class PromptStream:
    """Endless iterator of training problems with a state that can be saved and restored.

    Each source is a grain data set. The run's seed shuffles its rows in each epoch, and every row comes once per epoch.
    A restored stream gives the same problems as long as the rewards are the same (`observe`).

    Not thread-safe (grain iterators are not).
    """

    def __init__(
        self,
        config: Config,
        opened: Sequence[OpenedSource],
        *,
        quarantine: Callable[[BadRow], None] | None = None,
        digests: Mapping[str, str] | None = None,
    ) -> None:
        """Starts at the first problem of each source.

        Calls `quarantine` with each bad row of generated sources. `digests` are hashes of the evaluation sets' rows by
        field name, which must match on resume.
        """
        self._digests = dict(digests or {})
        self._opened = {o.name: o for o in opened}
        self._sieves = {o.name: _ProblemFilter(quarantine) for o in opened}
        self._iterators = {o.name: iter(_dataset(o, config.run.seed, self._sieves[o.name])) for o in opened}
        self._num_drawn = dict.fromkeys(self._opened, 0)
        self._mixture = Mixture(list(self._opened))
        self._curriculum = Curriculum(config.prompts)

    def __next__(self) -> Problem:
        name = self._mixture.pick(self._curriculum.weights())
        self._num_drawn[name] += 1
        return next(self._iterators[name])

    def observe(self, source: str, reward: float) -> None:
        """Records the mean reward of a group whose problem is from `source`."""
        self._curriculum.observe(source, reward)

    def metrics(self) -> dict[str, float]:
        """Returns epochs, bad-row counts and the shares and rewards of a mixture (`metric_names.py`)."""
        epochs = {n: self._num_drawn[n] / len(o.problems) for n, o in self._opened.items() if not o.is_endless}
        row = {"prompts/epoch": max(epochs.values())} if epochs else {}
        if any(o.is_endless for o in self._opened.values()):
            row["prompts/bad_rows"] = float(sum(s.num_bad for s in self._sieves.values()))
            row["prompts/too_long_rows"] = float(sum(s.num_too_long for s in self._sieves.values()))
        if len(self._opened) == 1:
            return row
        weights = self._curriculum.weights()
        whole = sum(weights.values())
        row |= {f"prompts/{name}/epoch": epoch for name, epoch in epochs.items()}
        row |= {f"prompts/{name}/fraction": weight / whole for name, weight in weights.items()}
        row |= {f"prompts/{name}/problems": float(drawn) for name, drawn in self._num_drawn.items()}
        row |= {f"prompts/{name}/reward": reward for name, reward in self._curriculum.rewards.items()}
        return row

    def get_state(self) -> dict[str, Any]:
        """Returns the stream's position as JSON values."""
        return {
            "sources": {
                name: {
                    "iterator": iterator.get_state(),
                    "num_drawn": self._num_drawn[name],
                    "rows": self._rows(name),
                    **self._sieves[name].get_state(),
                }
                for name, iterator in self._iterators.items()
            },
            "mixture": self._mixture.get_state(),
            "curriculum": self._curriculum.get_state(),
            "digests": self._digests,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores a saved state; raises ValueError if rows differ. New sources start at their first problem."""
        for name, digest in self._digests.items():
            if state["digests"].get(name, digest) != digest:
                raise ValueError(
                    f"{name}: expected the rows that the run was evaluated on (hash {state['digests'][name]}), got "
                    f"others (hash {digest}). Restore the file, or start another run (--config.run.dir)"
                )
        for name, iterator in self._iterators.items():
            saved = state["sources"].get(name)
            if saved is None:
                logging.warning("prompts source=%s is new: it begins at its first problem", name)
                continue
            if saved["rows"] != self._rows(name):
                path = self._opened[name].source.path
                raise ValueError(
                    f"{path or name}: expected the rows that the run was trained on ({_told(saved['rows'])}), got "
                    f"others ({_told(self._rows(name))}). Restore the file, or start another run (--config.run.dir)"
                )
            iterator.set_state(saved["iterator"])
            self._num_drawn[name] = saved["num_drawn"]
            self._sieves[name].set_state(saved)
        self._mixture.set_state(state["mixture"])
        self._curriculum.set_state(state["curriculum"])

    def _rows(self, name: str) -> dict[str, Any]:
        """Returns the number of training rows of a source, and a content hash of its training and evaluation rows."""
        opened = self._opened[name]
        return {"num": len(opened.problems), "digest": "-".join(one.digest for one in opened.looked_at)}


def _told(rows: dict[str, Any]) -> str:
    return f"{rows['num']} rows, hash {rows['digest'] or 'none'}"


def _dataset(opened: OpenedSource, seed: int, sieve: "_ProblemFilter") -> grain.IterDataset[Any]:
    source = grain.MapDataset.source(opened.problems)
    if opened.is_endless:
        return source.to_iter_dataset(_NO_PREFETCH).filter(sieve.is_problem)
    # Each source of a mixture has its own shuffle. A single source has no name and uses the run's seed itself.
    seed = (seed + zlib.crc32(opened.name.encode())) % 2**32
    return source.seed(seed).shuffle().repeat().to_iter_dataset(_NO_PREFETCH)


class _ProblemFilter:
    def __init__(self, quarantine: Callable[[BadRow], None] | None) -> None:
        self._quarantine = quarantine
        self._num_in_a_row = 0
        self.num_bad = 0
        self.num_too_long = 0

    def is_problem(self, row: Problem | BadRow | None) -> bool:
        """Returns True if the row is a usable problem. Raises ValueError after too many consecutive unusable rows."""
        if not isinstance(row, BadRow):
            self._num_in_a_row = 0
            return row is not None
        self._num_in_a_row += 1
        self.num_too_long += row.is_too_long
        self.num_bad += not row.is_too_long
        if self._quarantine is not None:
            self._quarantine(row)
        check_bad_in_a_row(self._num_in_a_row, row)
        return False

    def get_state(self) -> dict[str, int]:
        return {"num_bad": self.num_bad, "num_too_long": self.num_too_long}

    def set_state(self, state: dict[str, Any]) -> None:
        self.num_bad, self.num_too_long = state["num_bad"], state["num_too_long"]
        self._num_in_a_row = 0


def load_prompts(
    config: Config,
    tokenizer: Tokenizer,
    *,
    gold_failures: SetAside | None = None,
    quarantine: Callable[[BadRow], None] | None = None,
    evaluated: Collection[str] = (),
    digests: Mapping[str, str] | None = None,
) -> tuple[PromptStream, list[Problem], list[BadRow]]:
    """Returns (training stream, held-out problems as `held_out_of`, quarantined rows).

    Args:
      config: the run's config.
      tokenizer: the model's tokenizer.
      gold_failures: rows whose reference answer fails validation.
      quarantine: called with each bad row of generated sources during training.
      evaluated: questions of evaluation sets, which are excluded from training.
      digests: row hashes of the evaluation sets by name, saved with the stream's position.

    Raises:
      ValueError: a source is unusable, or there are too few held-out problems.
    """
    opened = open_sources(config, tokenizer, gold_failures=gold_failures, evaluated=evaluated)
    bad = [row for source in opened for row in source.bad]
    return PromptStream(config, opened, quarantine=quarantine, digests=digests), held_out_of(opened), bad
