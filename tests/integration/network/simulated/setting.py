"""What a simulated run is told: one JSON file that its learner reads."""

import dataclasses
import json
import os
import pathlib

import numpy as np

from actor.weights.model_folder import tensor_table
from bridge.rollout_types import Version
from bridge.snapshots.snapshot_format import CHUNK_BYTES, TensorTable
from configs import overrides
from configs.run_folder import RunFolder
from configs.schema import Config
from configs.sections import (
    ActorConfig,
    AdmissionConfig,
    ModelConfig,
    PackingConfig,
    PublishConfig,
    RoundsConfig,
    RunConfig,
    SamplingConfig,
    StoreConfig,
    SupervisionConfig,
)
from tests.integration.network.simulated import model
from tests.integration.support.models import make_folder, perturbed, read_weights


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """A simulated run."""

    folder: str
    """The learner's: ledger, model, run folder."""
    name: str
    """The run's, and its id."""
    store_url: str
    """As the learner reaches it."""
    listen: str = ""
    """Where the learner serves snapshots; empty: nowhere, actors share its memory."""
    advertise: str = ""
    """The URL under which actors reach it; empty: the address it listens at."""
    snapshot_dir: str = ""
    """Where the learner's snapshots are; empty: shared memory."""
    num_groups: int = 200
    """Trained in all; then the learner ends."""
    groups_per_version: int = 20
    """A version is published when so many more are trained."""
    window: int = 32
    """Tickets that are out at once."""
    samples_per_group: int = 2
    response_tokens: int = 20
    length_spread: int = 7
    """Responses are up to so many tokens longer, each group's in its own way."""
    num_tensors: int = 8
    model_bytes: int = 2**20
    leader_lease_s: float = 3.0
    lease_s: float = 3.0
    retry_s: float = 300.0
    reader_grace_s: float = 10.0
    token_s: float = 0.01
    is_real: bool = False
    """Whether actors have real engines: then the model is a small transformer, and all groups are kept."""
    at_publish: str = "keep"
    """With real engines: what running requests do when weights are replaced."""

    @property
    def path(self) -> pathlib.Path:
        """The folder."""
        return pathlib.Path(self.folder)

    @property
    def run(self) -> str:
        """The run's id."""
        return self.name

    @property
    def ledger(self) -> pathlib.Path:
        """What was trained."""
        return self.path / "ledger"

    @property
    def model(self) -> pathlib.Path:
        """The model's folder."""
        return self.path / "model"

    @property
    def tensors(self) -> TensorTable:
        """The model's tensors."""
        if self.is_real:
            return tensor_table(self.model, dtype=model.DTYPE)
        return model.table(num_tensors=self.num_tensors, num_bytes=self.model_bytes)

    def weights(self, version: Version) -> dict[str, np.ndarray]:
        """What is published as a version."""
        if self.is_real:
            return perturbed(read_weights(self.model), seed=version.step)
        return model.weights(version, self.tensors)

    @property
    def chunk_bytes(self) -> int:
        """Of a snapshot; a download has some of them."""
        return 256 * 2**10 if self.is_real else CHUNK_BYTES

    @property
    def kept_groups(self) -> pathlib.Path:
        """A folder with the groups that real engines made and that were trained."""
        return self.path / "groups"

    @property
    def goal_file(self) -> pathlib.Path:
        """How many groups are trained in all, where that was decided on the way."""
        return self.path / "goal"

    @property
    def goal(self) -> int:
        """Groups trained in all."""
        return int(self.goal_file.read_text()) if self.goal_file.exists() else self.num_groups

    @property
    def tickets(self) -> list[str]:
        """The ids of all tickets."""
        return [ticket_id(order) for order in range(self.goal)]

    @property
    def last_step(self) -> int:
        """That the learner ends at."""
        return self.goal // self.groups_per_version

    @property
    def config(self) -> Config:
        """The run's config, as real actors read it."""
        return Config(
            preset="simulated",
            run=RunConfig(name=self.name, dir=str(self.path / "run")),
            model=ModelConfig(path=str(self.model), max_tokens=512, served_dtype=model.DTYPE),
            packing=PackingConfig(row_tokens=512),
            admission=AdmissionConfig(policy="window", sequences=self.window * self.samples_per_group),
            rounds=RoundsConfig(samples_per_group=self.samples_per_group),
            sampling=SamplingConfig(max_response_tokens=self.response_tokens),
            store=StoreConfig(url=self.store_url, leader_lease_s=self.leader_lease_s, outage_timeout_s=self.retry_s),
            publish=PublishConfig(
                when="every",
                at_publish=self.at_publish,  # pyright: ignore[reportArgumentType]
                snapshot_dir=self.snapshot_dir,
                reader_grace_s=self.reader_grace_s,
                serve="https" if self.listen else "none",
                listen=self.listen or "127.0.0.1:0",
                advertise=self.advertise,
            ),
            actor=ActorConfig(
                max_num_seqs=4 * self.samples_per_group, lease_s=self.lease_s, enforce_eager=self.is_real
            ),
            supervision=SupervisionConfig(heartbeat_timeout_s=10.0),
        )

    def write(self) -> pathlib.Path:
        """Writes it, the run's config and the model into the folder; returns the file."""
        if self.is_real:
            make_folder(self.model, tied=False)
            self.kept_groups.mkdir()
        else:
            model.write_folder(self.model, self.tensors)
        (self.path / "run").mkdir()
        RunFolder(self.path / "run").run_id_file.write_text(self.run)
        (self.path / "config.json").write_text(overrides.to_json(self.config))
        file = self.path / "setting.json"
        file.write_text(json.dumps(dataclasses.asdict(self)))
        return file


def ticket_id(order: int) -> str:
    """Of the ticket of that order."""
    return f"t{order:06d}"


def read(file: str | os.PathLike[str]) -> Setting:
    """What `Setting.write` wrote."""
    return Setting(**json.loads(pathlib.Path(file).read_text()))
