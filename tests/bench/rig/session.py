"""One short run of the rig, as it travels to the two processes."""

import dataclasses
import json
import pathlib
from typing import Any, Literal

import msgspec

from configs import overrides
from configs.run_folder import RunFolder, set_up_run
from configs.schema import Config
from launch.tools.plan.profile import EngineProfile
from tests.bench.rig.lengths import Lengths, Work


@dataclasses.dataclass(frozen=True, kw_only=True)
class Session:
    """A run of its own: config, folder, store; on the engine and the compiled steps that all sessions share."""

    config: Config
    lengths: Lengths | None = None
    """None: responses end when the model ends them."""
    rewards: Literal["hash", "task"] = "hash"
    flat_share: float = 0.0
    """Of the prompts, with rewards by hash: their groups have no variance."""
    passes_per_token: float = 0.0
    """Gradient passes the learner computes per real token, most of them thrown away; see `paced_steps`. 0: one a
    micro-batch, as it is."""
    engine: EngineProfile | None = None
    """A paced engine of this speed (`paced_engine`) serves instead of the real one."""
    num_engines: int = 1
    """Engine processes that serve it; the second shares the learner's core."""

    episodes: Work | None = None
    """What responses are, instead of one turn (`tests.bench.agentic.play_process` alone knows them)."""

    @property
    def folder(self) -> pathlib.Path:
        return pathlib.Path(self.config.run_dir)

    def to_json(self) -> dict[str, Any]:
        rest = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "config"}
        return msgspec.to_builtins(rest) | {"config": json.loads(overrides.to_json(self.config))}

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> "Session":
        config = overrides.from_dict(raw["config"])
        types = {field.name: field.type for field in dataclasses.fields(cls) if field.name != "config"}
        return cls(config=config, **{name: msgspec.convert(raw[name], type_) for name, type_ in types.items()})

    def prepare(self, model_folder: pathlib.Path) -> None:
        """Makes the run folder as the launcher does."""
        folder = set_up_run(self.config)
        RunFolder(folder).model_path_file.write_text(f"{model_folder}\n")
