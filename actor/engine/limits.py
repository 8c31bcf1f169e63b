"""The limits an engine is started with, where they differ from the config's: a small JSON file in the run folder.

The actor writes it when it wants another size; so may an operator, with a running actor too: it finishes what it has
and starts again with them.
"""

import dataclasses
import os
import pathlib

import msgspec

from bridge.files import replace_file


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """How large an engine is, which can't be changed while it runs; an actor's deadlines are `actor.limits.Limits`."""

    max_num_seqs: int
    tensor_parallel_size: int


class _File(msgspec.Struct, forbid_unknown_fields=True):
    max_num_seqs: int | None = None
    tensor_parallel_size: int | None = None


class LimitsFile:
    """`limits/<actor>.json`, read when it changes."""

    def __init__(self, path: pathlib.Path, *, default: EngineLimits, max_tensor_parallel_size: int) -> None:
        """`default` fills in what the file leaves out; nothing is read yet."""
        self.path = path
        self.refused_path = path.with_suffix(".refused.json")
        self._default = default
        self._max_tensor_parallel_size = max_tensor_parallel_size
        self._seen: tuple[int, int, int] | None = None

    def read(self) -> EngineLimits:
        """The limits; the default if there is no file.

        Raises:
          ValueError: the file can't be used; one line says why.
        """
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return self._default
        try:
            given = msgspec.json.decode(data, type=_File)
        except msgspec.DecodeError as e:  # covers ValidationError
            raise ValueError(
                f'{self.path}: {e}; want {{"max_num_seqs": {self._default.max_num_seqs}, '
                f'"tensor_parallel_size": {self._default.tensor_parallel_size}}}'
            ) from e
        limits = EngineLimits(
            max_num_seqs=self._default.max_num_seqs if given.max_num_seqs is None else given.max_num_seqs,
            tensor_parallel_size=(
                self._default.tensor_parallel_size if given.tensor_parallel_size is None else given.tensor_parallel_size
            ),
        )
        if limits.max_num_seqs < 1:
            raise ValueError(f"{self.path}: max_num_seqs must be >= 1, got {limits.max_num_seqs}")
        if not 1 <= limits.tensor_parallel_size <= self._max_tensor_parallel_size:
            raise ValueError(
                f"{self.path}: tensor_parallel_size must be between 1 and {self._max_tensor_parallel_size} "
                f"(actor.max_tensor_parallel_size), got {limits.tensor_parallel_size}"
            )
        return limits

    def read_if_changed(self) -> EngineLimits | None:
        """The limits if the file is there and another one than at the last call.

        Raises:
          ValueError: see `read`; once for each change.
        """
        try:
            stat = os.stat(self.path)
        except FileNotFoundError:
            return None
        seen = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
        if seen == self._seen:
            return None
        self._seen = seen
        return self.read()

    def write(self, limits: EngineLimits) -> None:
        """Replaces the file, whole."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self.path, msgspec.json.encode(dataclasses.asdict(limits)))

    def refuse(self) -> bool:
        """Puts the file aside, since no engine starts with it; False if there is none to blame."""
        try:
            os.replace(self.path, self.refused_path)
        except FileNotFoundError:
            return False
        return True
