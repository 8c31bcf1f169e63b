"""What a run with adapters leaves: the merged model, and the adapters in PEFT's format, in transformers the same."""

import dataclasses
import json
import os
import pathlib
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from bridge.adapter_names import combine
from configs.run_folder import RunFolder
from configs.sections import LoraConfig
from learner.checkpoint import Checkpoints
from learner.devices.mesh import make_mesh
from learner.lora.adapters import init_adapters
from learner.model.config import Architecture
from learner.model.decoder import init_params, make_apply, output_head
from learner.model.hf import io as hf_io
from learner.restore import Weights, load_base, trainer_of
from learner.update.step import build_steps
from tests.learner.lora.publisher import NoPublisher
from tests.learner.model.tiny import config_of, row
from tests.learner.streams import config_of as run_config

ROOT = pathlib.Path(__file__).resolve().parents[3]
TOKENS = np.random.default_rng(0).integers(0, 61, (2, 9))
LORAS = {
    "all": LoraConfig(rank=4, alpha=6.0),
    "some": LoraConfig(rank=3, alpha=5.0, targets="q,v,down", rank_stabilized=True),
}


def logits(model):
    with torch.no_grad():
        return model(torch.from_numpy(TOKENS)).logits.numpy()


@pytest.fixture(params=[("qwen2-untied", "all"), ("llama-tied", "some")], ids="-".join)
def saved(request, tmp_path):
    """A run folder with both, the base's folder, and the logits of the learner's own decoder."""
    name, lora = request.param[0], LORAS[request.param[1]]
    architecture = config_of(name)
    base, adapters = random_weights(architecture, lora)
    hf_io.save(tmp_path / "base", architecture, base)
    run = RunFolder(tmp_path / "run")
    trainer = trainer_with(adapters, lora, tmp_path / "base", run)
    trainer.save_model(run.model(7), tmp_path / "base")
    params = combine(base, adapters)
    own = make_apply(architecture, lora=lora)(params, *row(TOKENS)) @ output_head(params).T
    yield run, tmp_path / "base", np.asarray(own)
    trainer.checkpoints.close()


def random_weights(architecture, lora):
    """A base, and adapters that change it."""
    fresh = init_params(architecture, jax.random.key(1))
    base = jax.tree_util.tree_map_with_path(lambda path, x: x if "scale" in str(path) else x * 5, fresh)
    random = np.random.default_rng(2)
    adapters = jax.tree.map(
        lambda x: jax.numpy.asarray(random.normal(0, 0.2, x.shape), "float32"),
        init_adapters(architecture, lora, jax.random.key(0)),
    )
    return base, adapters


def trainer_with(adapters, lora, base_folder, run, *, held_as="float32"):
    """Of a learner at step 7, which multiplies and serves in `held_as`."""
    config = dataclasses.replace(run_config(), lora=lora)
    config = dataclasses.replace(
        config, model=dataclasses.replace(config.model, compute_dtype=held_as, served_dtype=held_as)
    )
    architecture = Architecture.from_hf(base_folder)
    steps = build_steps(architecture, config, make_mesh(devices=jax.devices()[:1]))
    weights = Weights(config, architecture)
    return trainer_of(
        config,
        architecture,
        steps,
        dataclasses.replace(steps.init(adapters), step=jax.numpy.int32(7)),
        weights,
        base_folder,
        publisher=NoPublisher(),
        checkpoints=Checkpoints(run.checkpoints, keep=1),
        base=load_base(weights, base_folder),
    )


def test_the_merged_model_is_what_the_learner_computes(saved):
    run, base, own = saved
    model = AutoModelForCausalLM.from_pretrained(run.model(7), attn_implementation="eager").float()
    np.testing.assert_allclose(logits(model), own, atol=1e-4)
    plain = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager").float()
    assert np.abs(logits(plain) - own).max() > 0.05


def test_the_adapter_folder_added_to_the_base_by_hand_is_what_the_learner_computes(saved):
    run, base, own = saved
    config = json.loads((run.adapter(7) / "adapter_config.json").read_text())
    tensors = load_file(run.adapter(7) / "adapter_model.safetensors")
    assert config["peft_type"] == "LORA" and config["base_model_name_or_path"] == str(base)
    scale = config["lora_alpha"] / (config["r"] ** 0.5 if config["use_rslora"] else config["r"])
    model = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager").float()
    num_added = 0
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in config["target_modules"]:
            a, b = (tensors.pop(f"base_model.model.{name}.lora_{x}.weight") for x in "AB")
            module.weight.data += scale * b @ a
            num_added += 1
    assert not tensors and num_added == len(config["target_modules"]) * model.config.num_hidden_layers
    np.testing.assert_allclose(logits(model), own, atol=1e-4)


def test_the_adapter_folder_loads_in_transformers_by_peft(saved):
    run, base, own = saved
    model = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager").float()
    model.load_adapter(str(run.adapter(7)))
    np.testing.assert_allclose(logits(model), own, atol=1e-4)


def test_saving_again_replaces_the_adapters_that_a_killed_save_left(saved):
    run, base, _ = saved
    from learner.lora import peft

    (run.adapter(7) / "adapter_model.safetensors").write_bytes(b"half")
    lora, architecture = LORAS["all"], config_of("qwen2-untied")
    peft.save(run.adapter(7), architecture, lora, init_adapters(architecture, lora, jax.random.key(0)), base=str(base))
    assert load_file(run.adapter(7) / "adapter_model.safetensors")


@pytest.fixture
def in_bfloat16(tmp_path):
    """A trainer whose base is held in bfloat16, its run, the folder of that base, whose files have float32, and LoRA's
    settings."""
    architecture, lora = config_of("qwen2-untied"), LORAS["some"]
    base, adapters = random_weights(architecture, lora)
    hf_io.save(tmp_path / "base", architecture, base, max_shard_bytes=60_000)
    run = RunFolder(tmp_path / "run")
    trainer = trainer_with(adapters, lora, tmp_path / "base", run, held_as="bfloat16")
    yield trainer, run, tmp_path / "base", lora
    trainer.checkpoints.close()


def tensors_of(folder):
    return {name: x for file in sorted(folder.glob("*.safetensors")) for name, x in load_file(file).items()}


def test_base_held_in_bfloat16_is_exported_as_its_files_have_it(in_bfloat16):
    trainer, run, folder, lora = in_bfloat16
    trainer.save_model(run.model(7), folder)
    base, got, adapters = tensors_of(folder), tensors_of(run.model(7)), tensors_of(run.adapter(7))
    assert got.keys() == base.keys() and {x.dtype for x in got.values()} == {torch.float32}
    num_merged = 0
    for name, w in base.items():
        pair = [adapters.get(f"base_model.model.{name.removesuffix('.weight')}.lora_{x}.weight") for x in "AB"]
        if pair[0] is None:
            assert torch.equal(got[name], w), name
            continue
        a, b = (np.asarray(x, np.float64) for x in pair)
        np.testing.assert_allclose(got[name], np.asarray(w, np.float64) + lora.scale * b @ a, atol=1e-5)
        num_merged += 1
    assert num_merged == 3 * trainer.architecture.num_layers
    # What the learner holds is not that.
    held = np.asarray(trainer.base.params["embed"]["embedding"], "float32")
    assert np.abs(held - base["model.embed_tokens.weight"].numpy()).max() > 5e-4


def test_base_whose_files_changed_meanwhile_is_not_merged_with(in_bfloat16):
    trainer, run, folder, _ = in_bfloat16
    file = sorted(folder.glob("*.safetensors"))[0]
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(ValueError, match="base have changed since the learner started .* bring them back"):
        trainer.save_model(run.model(7), folder)
    assert not run.model(7).exists()


def test_base_that_lost_nothing_is_merged_as_it_is_held(tmp_path):
    """Its files may be gone meanwhile."""
    architecture, lora = config_of("qwen2-untied"), LORAS["some"]
    base, adapters = random_weights(architecture, lora)
    hf_io.save(tmp_path / "base", architecture, base, dtype="bfloat16")
    run = RunFolder(tmp_path / "run")
    trainer = trainer_with(adapters, lora, tmp_path / "base", run, held_as="bfloat16")
    want = tensors_of(tmp_path / "base")["model.embed_tokens.weight"]
    (tmp_path / "base" / "model.safetensors").unlink()
    trainer.save_model(run.model(7), tmp_path / "base")
    assert torch.equal(tensors_of(run.model(7))["model.embed_tokens.weight"], want.float())
    trainer.checkpoints.close()


SHARED = """
import pathlib, sys
import jax, numpy as np

folder, role, port = pathlib.Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=role)
from bridge.weights_digest import weights_digest
from learner.devices.mesh import make_mesh, param_spec
from learner.lora.base import Base
from learner.lora.merged_files import merged
from learner.model.hf import io
from tests.learner.lora.test_export import LORAS, random_weights

mesh, lora = make_mesh(fsdp=2), LORAS["some"]
place = lambda path, shape: jax.sharding.NamedSharding(mesh, param_spec(path, shape, mesh))
architecture, params = io.load(folder / "base", dtype="bfloat16", sharding_fn=place)
books = {"base": weights_digest(folder / "base")}
base = Base(params=params, books=books, folder=folder / "base", is_rounded=True)
adapters = random_weights(architecture, lora)[1]
on_host = jax.tree.map(np.asarray, adapters)
with merged(base, adapters, on_host, architecture, scale=lora.scale, dtype="float32") as whole:
    io.save(folder / "out", architecture, whole, dtype="float32", max_shard_bytes=20_000)
"""


@pytest.mark.integration
def test_two_processes_share_out_the_files_of_what_one_would_write(in_bfloat16):
    trainer, run, folder, _ = in_bfloat16
    trainer.save_model(run.model(7), folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", SHARED, str(folder.parent)]
    processes = [subprocess.Popen([*command, str(role), port], cwd=ROOT, env=env) for role in range(2)]
    try:
        assert [process.wait(timeout=240) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    out = folder.parent / "out"
    assert len([*out.glob("*.safetensors")]) > 2
    got, want = tensors_of(out), tensors_of(run.model(7))
    assert got.keys() == want.keys() and all(torch.equal(x, want[name]) for name, x in got.items())
