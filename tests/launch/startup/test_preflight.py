import errno
import json
import shutil
import sys
from typing import Any

import jax
import pytest

from configs import schema, sections
from configs.run_folder import set_up_run, snapshot_folder
from launch.startup import preflight
from launch.supervision.placement import Machine
from learner.update.optimizer import make_optimizer
from tests.learner.model_folder import CHAT_TEMPLATE, make_model_folder


@pytest.fixture
def folder(tmp_path):
    return make_model_folder(tmp_path / "model")


def config_of(**given):
    fields: dict[str, Any] = {
        "evaluation": sections.EvaluationConfig(num_problems=5),
        "prompts": sections.PromptsConfig(task_args={"max_terms": 2}, pattern=r":\s*(.*=)"),
    }
    return schema.Config(preset="test", **fields | given)


def refusal(folder, config=None):
    """What is said; always a single line."""
    with pytest.raises(ValueError) as e:
        preflight.check(config or config_of(), folder)
    assert "\n" not in str(e.value)
    return str(e.value)


def edit(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.heavy
def test_check_a_good_folder_passes(folder):
    preflight.check(config_of(), folder)
    preflight.check(
        config_of(model=sections.ModelConfig(max_tokens=512), packing=sections.PackingConfig(row_tokens=512)), folder
    )


RACE = sections.RoundsConfig(groups_per_round=32, samples_per_group=8, overprovision_prompts=1.25)
"""40 prompts of 8 responses."""
NO_GPU = Machine(gpus=(), cores=(0, 1))


@pytest.mark.parametrize(
    ("roles", "engines", "said"),
    [
        (("learner", "actor"), dict(max_num_seqs=64), "warning: with one engine the 320 requests"),
        (("learner", "actor"), dict(max_num_seqs=64, num_engines=4), "warning: with 4 engines the 320 requests"),
        (("learner", "actor"), dict(max_num_seqs=64, num_engines=5), ""),
        (("learner", "actor"), dict(max_num_seqs=320), ""),
        (("learner",), dict(max_num_seqs=64, num_engines=5), "note: the 320 requests of a round race, so all must run"),
    ],
)
def test_check_engines_says_how_many_a_race_wants(roles, engines, said):
    notes = preflight.check_engines(config_of(rounds=RACE, actor=sections.ActorConfig(**engines)), roles, NO_GPU)
    assert len(notes) == bool(said) and all(n.startswith(said) and "\n" not in n for n in notes)
    assert all("this requires 5 engines of 64 sequences" in n for n in notes)


def test_check_engines_without_a_race_says_nothing():
    assert preflight.check_engines(config_of(actor=sections.ActorConfig(max_num_seqs=1)), ("learner",), NO_GPU) == []


@pytest.mark.parametrize(
    ("environment", "is_cached", "warns"), [("guess", False, True), ("guess", True, False), ("", False, False)]
)
@pytest.mark.parametrize("roles", [("learner",), ("learner", "actor")])
def test_check_engines_warns_of_turns_that_compute_their_history_again(roles, environment, is_cached, warns):
    prompts = sections.PromptsConfig(environment=environment) if environment else sections.PromptsConfig()
    config = config_of(prompts=prompts, actor=sections.ActorConfig(prefix_caching=is_cached))
    notes = preflight.check_engines(config, roles, NO_GPU)
    assert len(notes) == warns and all("actor.prefix_caching" in n and "\n" not in n for n in notes)


def test_check_engines_warns_of_a_device_that_learner_and_engine_have():
    engine = sections.ActorConfig(devices="0", gpu_memory_utilization=0.2)
    config = config_of(actor=engine, mesh=sections.MeshConfig(devices="0"))
    (note,) = preflight.check_engines(config, ("learner", "actor"), Machine(gpus=("0", "1"), cores=(0,)))
    assert note.startswith("warning: learner and actor-0 share device 0; assign separate")


def test_check_missing_folder(tmp_path):
    assert "no model folder" in refusal(tmp_path / "none")


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda f: (f / "config.json").unlink(), "no model config at"),
        (lambda f: (f / "config.json").write_text("{"), "config.json is not JSON"),
        (lambda f: edit(f / "config.json", model_type="opt"), "model_type: expected one of"),
        (lambda f: (f / "model.safetensors").unlink(), "missing weights: model.safetensors"),
        (lambda f: (f / "tokenizer.json").unlink(), "has no tokenizer.json"),
        (lambda f: edit(f / "config.json", vocab_size=64), "does not match its model: it has token id 97"),
        (lambda f: edit(f / "config.json", max_position_embeddings=32), "model.max_tokens: expected at most"),
        (lambda f: (f / "model.safetensors.index.json").write_text("[]"), "expected an index of safetensors files"),
    ],
)
def test_check_unusable_model_folder_is_refused_in_one_line(folder, harm, said):
    harm(folder)
    assert said in refusal(folder)


def test_check_index_names_the_files_that_are_missing(folder):
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model-1.safetensors").write_bytes(b"")
    assert refusal(folder).endswith("missing weights: model-2.safetensors, named in model.safetensors.index.json")
    (folder / "model-2.safetensors").write_bytes(b"")
    preflight.check(config_of(), folder)


def test_check_chat_template_on_needs_one(folder):
    config = config_of(prompts=sections.PromptsConfig(chat_template="on"))
    assert "has no chat template" in refusal(folder, config)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    assert "no chat template" not in refusal(folder, config)  # these prompts are too long now


TEMPLATE = "{% for m in messages %}{{ m.content }}<pad>{% endfor %}{% if enable_thinking %}t{% endif %}"


@pytest.mark.parametrize(
    ("template", "prompts", "said"),
    [
        (TEMPLATE, dict(template_arguments={"enable_thinkin": True}), "unknown argument enable_thinkin; remove it"),
        (
            "",
            dict(template_arguments={"enable_thinking": True}),
            "template_arguments has no effect: .*no chat template",
        ),
        (TEMPLATE, dict(template_name="rag"), "has no chat template 'rag'; it has default"),
    ],
)
def test_check_settings_of_a_template_that_can_not_take_them_are_refused(folder, template, prompts, said):
    (folder / "chat_template.jinja").write_text(template)
    config = config_of(prompts=sections.PromptsConfig(task_args={"max_terms": 2}, **prompts))
    with pytest.raises(ValueError, match=said):
        preflight.check_model(config, folder)


def test_check_several_templates_without_a_default_want_a_name_unless_none_is_applied(folder):
    (folder / "additional_chat_templates").mkdir()
    for name in ("a", "b"):
        (folder / "additional_chat_templates" / f"{name}.jinja").write_text(TEMPLATE)
    assert "has the chat templates a, b but none named default" in refusal(folder)
    preflight.check_model(config_of(prompts=sections.PromptsConfig(chat_template="off")), folder)
    preflight.check_model(config_of(prompts=sections.PromptsConfig(template_name="a")), folder)


def test_check_says_which_end_of_a_turn_is_in_none_of_the_files(folder):
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    notes = preflight.check(config_of(), folder)
    assert "ends a turn with '<pad>' (96)" in notes[0] and notes[0].startswith("warning: ")


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        (dict(path="none.jsonl"), "no prompts file 'none.jsonl'"),
        (dict(task="nosuch"), "prompts.task='nosuch'"),
        (dict(task_args={"min_terms": 9, "max_terms": 9, "min_digits": 4}), "tokens"),
        (dict(pattern="(zebra)"), "prompts.pattern '(zebra)' is not in"),
    ],
)
def test_check_unusable_prompts_are_refused_in_one_line(folder, prompts, said):
    assert said in refusal(folder, config_of(prompts=sections.PromptsConfig(**prompts)))


def test_check_file_of_which_too_much_is_set_aside_is_refused_and_a_share_may_be_allowed(folder, tmp_path):
    rows = [{"prompt": f"{n} + {n} =" + "9" * 60 * (n % 5 == 0), "answer": 2 * n} for n in range(60)]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    fields = {"path": str(tmp_path / "t.jsonl"), "held_out_one_in": 4}
    said = refusal(folder, config_of(prompts=sections.PromptsConfig(**fields)))
    assert "12 of 60 rows would be quarantined" in said and "raise model.max_tokens" in said
    notes = preflight.check(config_of(prompts=sections.PromptsConfig(**fields, max_bad_share=0.2)), folder)
    assert any("12 invalid rows excluded" in note for note in notes)


def test_check_room_counts_two_snapshots_and_a_copy(folder, tmp_path, monkeypatch):
    (folder / "model.safetensors").write_bytes(b"x" * 1000)
    config = config_of(publish=sections.PublishConfig(snapshot_dir=str(tmp_path / "not" / "there")))
    asked = []

    def disk_usage(path):
        asked.append(path)
        return shutil._ntuple_diskusage(10**6, 10**6 - free, free)

    monkeypatch.setattr(preflight.shutil, "disk_usage", disk_usage)
    free = 3000
    preflight.check(config, folder)
    free = 2999
    assert "set publish.snapshot_dir to a larger filesystem" in refusal(folder, config)
    assert set(asked) == {tmp_path}


def test_check_room_counts_the_served_dtype_and_what_the_run_has_there(folder, tmp_path, set_free):
    (folder / "model.safetensors").write_bytes(b"x" * 1000)
    edit(folder / "config.json", torch_dtype="bfloat16")  # served in float32: twice the file
    config = config_of(
        publish=sections.PublishConfig(snapshot_dir=str(tmp_path)), run=sections.RunConfig(dir=str(tmp_path / "run"))
    )
    set_free(6000)
    preflight.check(config, folder)
    set_free(5999)
    assert "publish.snapshot_dir" in refusal(folder, config)
    set_up_run(config)
    snapshots = snapshot_folder(config)
    snapshots.mkdir()
    (snapshots / "slot-0").write_bytes(b"x")  # the run's own, which is written over
    preflight.check(config, folder)


def test_check_run_room_counts_the_checkpoints_that_are_there_at_once(folder, tmp_path, set_free):
    (folder / "model.safetensors").write_bytes(b"x" * 1000)  # 250 parameters
    set_free(3 * 3 * 1000)
    run = tmp_path / "run"
    config = config_of(run=sections.RunConfig(dir=str(run), num_updates=100))
    preflight.check_disk_space(config, folder)
    set_free(3 * 3 * 1000 - 1)
    with pytest.raises(ValueError, match="for 3 more checkpoints.*--config.run.dir"):
        preflight.check_disk_space(config, folder)
    # One save, at the end.
    preflight.check_disk_space(config_of(run=sections.RunConfig(dir=str(run), num_updates=12)), folder)


@pytest.mark.parametrize(
    ("there", "num_updates", "num_to_come"),
    [
        ([50], 1000, 2),
        ([50, 100], 1000, 1),
        ([50, 100, 150], 1000, 0),  # killed in the save that was to put the first one out
        ([450, 500], 520, 1),
        ([450, 500], 500, 0),  # done
    ],
)
def test_check_run_room_what_an_earlier_start_has_saved_has_its_room(
    folder, tmp_path, set_free, there, num_updates, num_to_come
):
    (folder / "model.safetensors").write_bytes(b"x" * 1000)
    config = config_of(run=sections.RunConfig(dir=str(tmp_path / "run"), num_updates=num_updates))
    for step in there:
        (tmp_path / "run" / "checkpoints" / str(step)).mkdir(parents=True)  # smaller than reckoned: compressed
    killed = tmp_path / "run" / "checkpoints" / "550.orbax-checkpoint-tmp"
    killed.mkdir()
    (killed / "arrays").write_bytes(b"x" * 500)
    free = max(0, 3000 * num_to_come - 500)
    set_free(free)
    preflight.check_disk_space(config, folder)
    if num_to_come:
        set_free(free - 1)
        with pytest.raises(OSError, match=f"for {num_to_come} more checkpoints"):
            preflight.check_disk_space(config, folder)


def test_disk_of_a_run_with_a_critic_has_room_for_both_models(folder, tmp_path, set_free):
    (folder / "model.safetensors").write_bytes(b"x" * 1000)
    run = sections.RunConfig(dir=str(tmp_path / "run"), num_updates=4)
    config = config_of(run=run, loss=sections.LossConfig(advantage="gae"))
    free = 2 * 250 * 12  # one save; weights and two moments
    set_free(free)
    preflight.check_disk_space(config, folder)
    set_free(free - 1)
    with pytest.raises(ValueError, match="for 1 more checkpoints"):
        preflight.check_disk_space(config, folder)


@pytest.mark.parametrize(("has_begun", "error"), [(False, ValueError), (True, OSError)])
def test_disks_of_a_run_that_has_begun_may_have_room_again(folder, tmp_path, monkeypatch, set_free, has_begun, error):
    (folder / "model.safetensors").write_bytes(b"x" * 1000)
    config = config_of(run=sections.RunConfig(dir=str(tmp_path / "run")))
    if has_begun:
        (tmp_path / "run" / "checkpoints" / "50").mkdir(parents=True)

    def full(**_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(preflight.tempfile, "TemporaryFile", full)
    set_free(0)
    for check in (preflight.check_folders, preflight.check_snapshot_room, preflight.check_disk_space):
        with pytest.raises(error):
            check(config, folder)


@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("optimizer", [{}, {"mu_dtype": "bfloat16"}, {"name": "adafactor"}, {"name": "muon"}])
def test_check_run_room_is_what_the_optimizer_keeps(folder, tmp_path, set_free, param_dtype, optimizer):
    config = config_of(
        run=sections.RunConfig(dir=str(tmp_path / "run"), num_updates=4),
        model=sections.ModelConfig(param_dtype=param_dtype),
        optimizer=sections.OptimizerConfig(**optimizer),
    )
    edit(folder / "config.json", vocab_size=512, hidden_size=1024, tie_word_embeddings=False)
    params = {
        "layers": {"up_proj": {"kernel": jax.ShapeDtypeStruct((1, 1024, 1024), param_dtype)}},
        "embed": {"embedding": jax.ShapeDtypeStruct((512, 1024), param_dtype)},
        "lm_head": {"kernel": jax.ShapeDtypeStruct((512, 1024), param_dtype)},
    }
    state = jax.eval_shape(make_optimizer(config.optimizer, num_steps=1).init, params)
    kept = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((params, state)))
    (folder / "model.safetensors").write_bytes(bytes(4 * 2 * 1024 * 1024))
    set_free(kept)
    preflight.check_disk_space(config, folder)
    set_free(kept * 99 // 100)
    with pytest.raises(ValueError, match="set another --config.run.dir"):
        preflight.check_disk_space(config, folder)


def own(folder, **names):
    (folder / "mine.py").write_text(
        "import jax\ndef loss(logprobs, inputs): return -inputs.advantages * logprobs, logprobs > 0\n"
        "def short(rewards, config): return rewards[1:]\ndef one(text): ...\n"
    )
    (folder / "judge.py").write_text("def score(response_text, task): return 1.0\n")
    loss = {k: v for k, v in names.items() if k != "verifier"}
    return config_of(
        loss=sections.LossConfig(**loss), prompts=sections.PromptsConfig(verifier=names.get("verifier", "exact"))
    )


@pytest.mark.heavy
def test_check_functions_of_ones_own_are_tried_and_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = own(tmp_path, name="mine:loss", verifier="judge:score")
    assert preflight.check_functions(config, ("learner", "actor")) == [
        "custom functions: loss.name=mine:loss, prompts.verifier=judge:score"
    ]
    assert "mine" not in sys.modules and "judge" not in sys.modules


@pytest.mark.heavy
def test_check_functions_of_the_other_machines_role_are_not_looked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = own(tmp_path, name="nowhere:loss", verifier="judge:score")
    assert len(preflight.check_functions(config, ("actor",))) == 1
    config = own(tmp_path, name="mine:loss", verifier="nowhere:score")
    assert len(preflight.check_functions(config, ("learner",))) == 1
    assert preflight.check_functions(config_of(), ("learner", "actor")) == []


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("names", "said"),
    [
        (
            dict(advantage="mine:short"),
            "loss.advantage=mine:short must return K=8 finite floats as a numpy array, or a list of K arrays with a "
            "float per turn or per token of each response, got 7 values",
        ),
        (dict(name="mine:los"), "has no 'los'; did you mean 'loss'?"),
        (dict(verifier="judge:sore"), "prompts.verifier=judge:sore: "),
        (
            dict(verifier="mine:one"),
            "expected a function (response_text, task, *, any of finish, num_tokens, thinking, message) -> float, got",
        ),
    ],
)
def test_check_functions_that_can_not_be_used_are_refused_in_one_line(tmp_path, monkeypatch, names, said):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError) as e:
        preflight.check_functions(own(tmp_path, **names), ("learner", "actor"))
    assert said in str(e.value) and "\n" not in str(e.value)


def test_check_functions_refuses_cores_for_verifiers_that_are_not_there():
    config = config_of(rewards=sections.RewardsConfig(cpu_cores="0,400000"))
    with pytest.raises(ValueError, match=r"rewards.cpu_cores: expected cores 0 to .* got \[400000\]"):
        preflight.check_functions(config, ("actor",))
