"""A learner with adapters goes on from its checkpoint, bit for bit, and from no other base."""

import dataclasses
import json

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from bridge import codec
from bridge.files import weights_digest
from configs.sections import LoraConfig, OptimizerConfig
from learner.checkpoint import Checkpoints
from learner.checkpoint_hosts import CheckpointError
from learner.distributed.sharding import make_mesh
from learner.model import hf_load as hf_io
from learner.model import hf_save
from learner.model.architecture import Architecture
from learner.model.lora import lora_metadata
from learner.restore import WeightLoader, load_base, restore, trainer_of
from learner.update.train_step import build_train_step
from tests.learner.model.publisher import NoPublisher
from tests.learner.streams import MODEL, config_of, fresh_params, random_groups, stream

LORA = LoraConfig(rank=3, alpha=6.0)
CONFIG = dataclasses.replace(config_of(kl_coef=0.1), lora=LORA)


@pytest.fixture
def model_folder(tmp_path):
    hf_save.save(tmp_path / "model", MODEL, fresh_params())
    return tmp_path / "model"


def start(tmp_path, model_folder, config=CONFIG):
    architecture = Architecture.from_hf(model_folder)
    steps = build_train_step(architecture, config, make_mesh(devices=jax.devices()[:1]))
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    weights = WeightLoader(config, architecture)
    base = load_base(weights, model_folder)
    state = restore(checkpoints, steps, weights, tmp_path, model_folder, base).state
    return trainer_of(
        config,
        architecture,
        steps,
        state,
        weights,
        model_folder,
        publisher=NoPublisher(),
        checkpoints=checkpoints,
        base=base,
    )


def losses(trainer, seeds):
    found = []
    for seed in seeds:
        for micro in stream(CONFIG, random_groups(seed, 4)):
            trainer.accumulate(micro)
        found.append(
            {
                name: float(value)
                for name, value in trainer.optimizer_step(0).items()
                if np.isfinite(value).all() and np.ndim(value) == 0
            }
        )
    return found


def save(trainer, step, **fields):
    model, base = json.loads(trainer.architecture.hf_json), trainer.base.metadata
    books = {"format": codec.FORMAT, "model": model, "mesh": CONFIG.mesh.axes, "lora": base} | fields
    trainer.save(step, json.loads(json.dumps(books)))
    trainer.checkpoints.wait()


@pytest.mark.heavy
def test_a_restored_learner_trains_on_as_if_nothing_had_happened(tmp_path, model_folder):
    one = start(tmp_path / "a", model_folder)
    want = losses(one, [0, 1, 2, 3])
    other = start(tmp_path / "b", model_folder)
    first = losses(other, [0, 1])
    save(other, 2)
    other.checkpoints.close()
    restored = start(tmp_path / "b", model_folder)
    assert int(restored.state.step) == 2
    assert first + losses(restored, [2, 3]) == want
    assert want[-1]["reference_kl"] > 0
    structure = jax.tree.structure(one.state.params)
    assert jax.tree.structure(restored.state.params) == structure


@pytest.mark.heavy
def test_muon_of_adapters_in_bfloat16_goes_on_from_its_checkpoint_and_no_other_optimizer_does(tmp_path, model_folder):
    optimizer = OptimizerConfig(name="muon", learning_rate=1e-2, mu_dtype="bfloat16", nu_dtype="bfloat16")
    config = dataclasses.replace(CONFIG, optimizer=optimizer)
    trainer = start(tmp_path, model_folder, config)
    losses(trainer, [0, 1])
    save(trainer, 2, optimizer="muon")
    trainer.checkpoints.close()
    with pytest.raises(CheckpointError, match="the optimizer state of muon, but optimizer.name is adamw"):
        start(tmp_path, model_folder)
    restored = start(tmp_path, model_folder, config)
    jax.tree.map(np.testing.assert_array_equal, restored.state.opt_state, trainer.state.opt_state)
    assert losses(restored, [2, 3]) == losses(trainer, [2, 3])
    jax.tree.map(np.testing.assert_array_equal, restored.state.params, trainer.state.params)


@pytest.mark.heavy
def test_a_checkpoint_holds_adapters_and_their_moments_alone(tmp_path, model_folder):
    trainer = start(tmp_path, model_folder)
    losses(trainer, [0])
    save(trainer, 1)
    trainer.checkpoints.close()
    arrays = ocp.StandardCheckpointer().restore((tmp_path / "checkpoints" / "1" / "arrays").absolute())
    saved = [x for x in jax.tree.leaves(arrays) if np.ndim(x)]  # the others are counters
    wanted = [np.asarray(x) for x in jax.tree.leaves(trainer.state.params)]
    # Each three times: as it is, and its two moments.
    assert sorted(x.shape for x in saved) == sorted(3 * [x.shape for x in wanted])
    of_params = jax.tree.leaves(arrays["params"])
    for want in wanted:
        assert any(x.shape == want.shape and np.array_equal(x, want) for x in of_params)
    base_shapes = {x.shape for x in jax.tree.leaves(trainer.frozen)}
    assert base_shapes and not base_shapes & {x.shape for x in saved}


@pytest.mark.heavy
def test_a_checkpoint_goes_on_from_its_own_base_alone(tmp_path, model_folder):
    trainer = start(tmp_path, model_folder)
    save(trainer, 1)
    trainer.checkpoints.close()
    wider = dataclasses.replace(CONFIG, lora=dataclasses.replace(LORA, alpha=7.0))
    with pytest.raises(CheckpointError, match=r"another lora: alpha was 6.0, is 7.0"):
        start(tmp_path, model_folder, wider)
    with pytest.raises(CheckpointError, match="another lora: alpha was 6.0, is None"):
        start(tmp_path, model_folder, dataclasses.replace(CONFIG, lora=LoraConfig()))
    file = model_folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match="adapters are of another base: expected .*model with weights of hash"):
        start(tmp_path, model_folder)


def test_weights_digest_of_shards_names_what_is_missing(tmp_path, model_folder):
    assert lora_metadata(LoraConfig(), model_folder) == {}
    hf_save.save(tmp_path / "shards", MODEL, fresh_params(), max_shard_bytes=3000)
    found = weights_digest(tmp_path / "shards")
    assert found != weights_digest(model_folder)
    last = sorted((tmp_path / "shards").glob("*.safetensors"))[-1]
    data = last.read_bytes()
    last.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert weights_digest(tmp_path / "shards") != found
    last.unlink()
    with pytest.raises(ValueError, match=f"has no weights: {last.name} is missing"):
        weights_digest(tmp_path / "shards")


@pytest.mark.heavy
def test_a_reference_of_its_own_is_loaded_beside_the_base(tmp_path, model_folder):
    other = tmp_path / "other"
    hf_save.save(other, MODEL, jax.tree.map(lambda x: x * np.float32(0.9), fresh_params()))
    config = dataclasses.replace(CONFIG, loss=dataclasses.replace(CONFIG.loss, reference_path=str(other)))
    trainer = start(tmp_path, model_folder, config)
    micro = stream(CONFIG, random_groups(0, 2))[0]
    plain = build_train_step(MODEL, config_of(), make_mesh(devices=jax.devices()[:1]))
    want = plain.score(hf_io.load(other)[1], micro.batch)
    np.testing.assert_allclose(np.asarray(trainer.anchors.score(micro.batch).reference), want, atol=1e-6)
