"""What a run with adapters leaves: the merged model, and the adapters in PEFT's format, in transformers the same."""

import dataclasses
import json
import pathlib

import jax
import numpy as np
import pytest

from bridge.param_names import combine
from configs.run_folder import RunFolder
from configs.sections import LoraConfig
from learner.checkpoint import Checkpoints
from learner.distributed.sharding import make_mesh
from learner.model import hf_save
from learner.model.architecture import Architecture
from learner.model.decoder import init_params, make_apply, output_head
from learner.model.lora import init_adapters
from learner.restore import WeightLoader, load_base, trainer_of
from learner.update.train_step import build_train_step
from tests.learner.model.publisher import NoPublisher
from tests.learner.model.tiny import config_of, row
from tests.learner.streams import config_of as run_config
from tests.support.lazy import safetensors_torch, torch, transformers

pytestmark = pytest.mark.heavy

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
    hf_save.save(tmp_path / "base", architecture, base)
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
    steps = build_train_step(architecture, config, make_mesh(devices=jax.devices()[:1]))
    weights = WeightLoader(config, architecture)
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


@pytest.mark.heavy
def test_the_merged_model_is_what_the_learner_computes(saved):
    run, base, own = saved
    model = transformers.AutoModelForCausalLM.from_pretrained(run.model(7), attn_implementation="eager").float()
    np.testing.assert_allclose(logits(model), own, atol=1e-4)
    plain = transformers.AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager").float()
    assert np.abs(logits(plain) - own).max() > 0.05


def test_the_adapter_folder_added_to_the_base_by_hand_is_what_the_learner_computes(saved):
    run, base, own = saved
    config = json.loads((run.adapter(7) / "adapter_config.json").read_text())
    tensors = safetensors_torch.load_file(run.adapter(7) / "adapter_model.safetensors")
    assert config["peft_type"] == "LORA" and config["base_model_name_or_path"] == str(base)
    scale = config["lora_alpha"] / (config["r"] ** 0.5 if config["use_rslora"] else config["r"])
    model = transformers.AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager").float()
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
    model = transformers.AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager").float()
    model.load_adapter(str(run.adapter(7)))
    np.testing.assert_allclose(logits(model), own, atol=1e-4)


def test_saving_again_replaces_the_adapters_that_a_killed_save_left(saved):
    run, base, _ = saved
    from learner.model import lora as model_lora

    (run.adapter(7) / "adapter_model.safetensors").write_bytes(b"half")
    lora, architecture = LORAS["all"], config_of("qwen2-untied")
    model_lora.save(
        run.adapter(7), architecture, lora, init_adapters(architecture, lora, jax.random.key(0)), base=str(base)
    )
    assert safetensors_torch.load_file(run.adapter(7) / "adapter_model.safetensors")


def tensors_of(folder):
    return {
        name: x
        for file in sorted(folder.glob("*.safetensors"))
        for name, x in safetensors_torch.load_file(file).items()
    }


@pytest.mark.heavy
def test_base_held_in_bfloat16_is_merged_as_it_is_held(tmp_path, caplog):
    architecture, lora = config_of("qwen2-untied"), LORAS["some"]
    base, adapters = random_weights(architecture, lora)
    hf_save.save(tmp_path / "base", architecture, base)
    run = RunFolder(tmp_path / "run")
    with caplog.at_level("WARNING"):
        trainer = trainer_with(adapters, lora, tmp_path / "base", run, held_as="bfloat16")
    assert "LoRA base rounded files=float32 devices=bfloat16" in caplog.text
    trainer.save_model(run.model(7), tmp_path / "base")
    base, got, adapters = tensors_of(tmp_path / "base"), tensors_of(run.model(7)), tensors_of(run.adapter(7))
    assert got.keys() == base.keys() and {x.dtype for x in got.values()} == {torch.float32}
    num_merged = 0
    for name, w in base.items():
        held = w.bfloat16().double().numpy()
        pair = [adapters.get(f"base_model.model.{name.removesuffix('.weight')}.lora_{x}.weight") for x in "AB"]
        if pair[0] is not None:
            a, b = (np.asarray(x, np.float64) for x in pair)
            held = held + lora.scale * b @ a
            num_merged += 1
        np.testing.assert_allclose(got[name], held, atol=1e-5, err_msg=name)
    assert num_merged == 3 * trainer.architecture.num_layers
    trainer.checkpoints.close()
