import dataclasses
from typing import Any

import pytest

from configs import sections
from configs.presets import rolloutpipe
from configs.schema import Config


def rounds(R=4, U=2, K=2, **fields):
    return sections.RoundsConfig(groups_per_round=R, groups_per_update=U, samples_per_group=K, **fields)


WINDOW: dict[str, Any] = {
    "admission": sections.AdmissionConfig(policy="window"),
    "publish": sections.PublishConfig(when="every"),
}


@pytest.mark.parametrize(
    ("section", "fields", "said"),
    [
        ("RunConfig", dict(name="../up"), "run.name"),
        ("RunConfig", dict(num_updates=0), "run.num_updates"),
        ("RunConfig", dict(seed=-1), "run.seed"),
        ("PromptsConfig", dict(held_out_one_in=1), "held_out_one_in"),
        ("PromptsConfig", dict(path="a.jsonl", verifier="reasoning_gym"), "reasoning-gym"),
        ("PromptsConfig", dict(pattern="no group"), "group in parentheses"),
        ("PromptsConfig", dict(pattern="("), "expected a regular expression"),
        ("LoraConfig", dict(rank=-1), "lora.rank must be in .0, 512"),
        ("LoraConfig", dict(rank=513), "lora.rank must be in .0, 512"),
        ("LoraConfig", dict(alpha=0.0), "lora.alpha must be > 0"),
        ("LoraConfig", dict(targets="q,lm_head"), "lora.targets: expected some of q,k,v.*, got 'lm_head'"),
        ("LoraConfig", dict(targets=""), "lora.targets: expected .*, got ''"),
        ("LoraConfig", dict(targets="q,q"), "lora.targets: expected distinct matrices"),
        (
            "LoraConfig",
            dict(alpha=16.0),
            "lora.alpha=16.0 has no effect without lora.rank; set lora.rank, or leave it out",
        ),
        ("LoraConfig", dict(targets="q,v"), "lora.targets=q,v has no effect without lora.rank"),
        ("LoraConfig", dict(rank_stabilized=True), "lora.rank_stabilized=True has no effect without lora.rank"),
        ("SamplingConfig", dict(top_p=0.9), "top_p=0.9"),
        ("SamplingConfig", dict(temperature=0.0), r"sampling.temperature must be in \[0.01, 2.0\]"),
        ("SamplingConfig", dict(temperature=0.005), "sampling.temperature.*got 0.005"),
        ("SamplingConfig", dict(temperature=2.5), "sampling.temperature.*got 2.5"),
        ("SamplingConfig", dict(temperature=float("inf")), "sampling.temperature.*got inf"),
        ("SamplingConfig", dict(temperature=float("nan")), "sampling.temperature.*got nan"),
        ("EvaluationConfig", dict(temperature=0.005), "evaluation.temperature.*got 0.005"),
        ("EvaluationConfig", dict(temperature=-1.0), "evaluation.temperature.*got -1.0"),
        ("EvaluationConfig", dict(temperature=float("inf")), "evaluation.temperature.*got inf"),
        ("EvaluationConfig", dict(temperature=float("nan")), "evaluation.temperature.*got nan"),
        ("PromptsConfig", dict(answer_in="text"), "prompts.answer_in=text has no effect with prompts.verifier=exact"),
        ("RoundsConfig", dict(groups_per_round=10, groups_per_update=4), r"U=4.*must divide.*R=10"),
        ("RoundsConfig", dict(max_lag_steps=-1), "max_lag_steps"),
        ("RoundsConfig", dict(overprovision_prompts=0.9), "rounds.overprovision_prompts must be in .1, 4"),
        ("RoundsConfig", dict(overprovision_samples=5.0), "rounds.overprovision_samples must be in .1, 4"),
        ("RoundsConfig", dict(ess_floor=1.0), "rounds.ess_floor"),
        ("RoundsConfig", dict(epochs=0), "rounds.epochs"),
        ("AdmissionConfig", dict(policy="fifo", async_ratio=1.0), "async_ratio requires admission.policy=window"),
        ("AdmissionConfig", dict(policy="window", async_ratio=-1.0), "admission.async_ratio"),
        (
            "AdmissionConfig",
            dict(policy="fifo", when_full="drop_oldest"),
            "drop_oldest requires admission.policy=window",
        ),
        ("AdmissionConfig", dict(policy="fifo", queue_groups=4), "queue_groups requires admission.policy=window"),
        ("AdmissionConfig", dict(policy="frontier", sequences=4), "sequences requires admission.policy=window"),
        ("AdmissionConfig", dict(policy="window", sequences=4, width=2), "Leave one out"),
        ("AdmissionConfig", dict(policy="fifo", width=4), "width .4. requires admission.policy=frontier or window"),
        ("PublishConfig", dict(kv_cache="recompute", at_publish="drain"), "recompute has no effect"),
        ("ActorConfig", dict(tensor_parallel_size=4, max_tensor_parallel_size=2), "max_tensor_parallel_size"),
        ("ActorConfig", dict(num_engines=0), "actor.num_engines must be > 0"),
        ("ActorConfig", dict(devices="2;3"), "expected 1 groups .actor.num_engines., got 2"),
        ("ActorConfig", dict(devices="2,3", num_engines=2), "expected 2 groups .actor.num_engines., got 1"),
        ("ActorConfig", dict(devices="2;", num_engines=2), "expected distinct devices, got ''"),
        ("ActorConfig", dict(devices="2;3,3", num_engines=2), "expected distinct devices, got '3,3'"),
        ("ActorConfig", dict(devices="2,3;4", num_engines=2), "expected 1 devices per engine .*, got '2,3'"),
        (
            "ActorConfig",
            dict(devices="2,3;4", num_engines=2, tensor_parallel_size=2),
            "expected 2 devices per engine .*, got '4'",
        ),
        (
            "ActorConfig",
            dict(devices="2;3,4,5", num_engines=2, elastic=True, max_tensor_parallel_size=2),
            "expected 1 to 2 devices per engine",
        ),
        ("ActorConfig", dict(devices="2;2", num_engines=2), "2 engines use device 2, each with 0.9"),
        ("ActorConfig", dict(cpu_cores="0;1"), "expected 1 groups .actor.num_engines., got 2"),
        ("ActorConfig", dict(cpu_cores="0-"), "expected 1 core lists .* got '0-'"),
        ("ActorConfig", dict(cpu_cores="3-1"), "expected 1 core lists .* got '3-1'"),
        ("ActorConfig", dict(cpu_cores="0,1", tensor_parallel_size=2), "expected 2 core lists"),
        ("PublishConfig", dict(every_n_steps=0), "every_n_steps"),
        ("PublishConfig", dict(every_n_steps=2), "every_n_steps .2. requires publish.when=every"),
        (
            "LossConfig",
            dict(name="tis", proximal="update"),
            "loss.proximal: expected one of batch, round, published, got",
        ),
        ("LossConfig", dict(clip_low=1.5), "clip_low"),
        ("LossConfig", dict(clip_high=-0.1), "clip_high"),
        ("LossConfig", dict(clip_high=float("inf")), "loss.clip_high must be finite"),
        ("LossConfig", dict(dual_clip=1.0), "loss.dual_clip must be > 1"),
        ("LossConfig", dict(name="truncated_is", max_weight=0.0), "loss.max_weight must be > 0, got 0"),
        ("LossConfig", dict(name="masked_is", min_weight=3.0), "loss.min_weight < loss.max_weight, got 3.0 and 2.0"),
        ("LossConfig", dict(advantage_eps=0.0), "loss.advantage_eps must be > 0"),
        ("LossConfig", dict(kl_coef=-1.0), "loss.kl_coef must be >= 0"),
        ("LossConfig", dict(entropy_coef=float("nan")), "loss.entropy_coef must be finite"),
        ("LossConfig", dict(entropy_coef=-0.01), "loss.entropy_coef must be >= 0"),
        ("LossConfig", dict(overlong_buffer_tokens=-1), "loss.overlong_buffer_tokens must be >= 0"),
        ("LossConfig", dict(length_penalty=-0.1), "loss.length_penalty must be >= 0, got -0.1"),
        ("LossConfig", dict(length_penalty=float("inf")), "loss.length_penalty must be finite"),
        ("LossConfig", dict(advantage="turn_grpo", turn_discount=0.0), "loss.turn_discount must be in .0, 1., got 0"),
        (
            "LossConfig",
            dict(advantage="turn_grpo", turn_discount=1.01),
            "loss.turn_discount must be in .0, 1., got 1.01",
        ),
        ("LossConfig", dict(advantage="turn_grpo", turn_discount=float("nan")), "loss.turn_discount must be finite"),
        ("OptimizerConfig", dict(beta2=1.0), "optimizer.beta2 must be in"),
        ("OptimizerConfig", dict(weight_decay=float("nan")), "weight_decay"),
        ("CheckpointConfig", dict(keep=1), "checkpoint.keep"),
        ("EvaluationConfig", dict(num_problems=-1), "evaluation.num_problems must be >= 0"),
        ("MeshConfig", dict(tensor=0), "mesh.tensor"),
    ],
)
def test_section_value_out_of_range_is_refused_by_name(section, fields, said):
    with pytest.raises(ValueError, match=said):
        getattr(sections, section)(**fields)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (dict(model=sections.ModelConfig(max_tokens=300)), r"packing.row_tokens \(256\)"),
        (dict(evaluation=sections.EvaluationConfig(num_problems=0)), "Set publish.probe_every_n_publishes=0"),
        (dict(sampling=sections.SamplingConfig(max_response_tokens=64)), "leave room for a"),
        (dict(admission=sections.AdmissionConfig(policy="window")), "require each other"),
        (
            dict(loss=sections.LossConfig(name="dapo", overlong_buffer_tokens=4)),
            "loss.name=dapo requires rounds.filter_zero_variance=True .dynamic sampling., got False",
        ),
        (dict(publish=sections.PublishConfig(when="every")), "require each other"),
        (WINDOW | dict(rounds=rounds(train_start="round_complete")), "requires publish.when=round_end"),
        (dict(rounds=rounds(R=8, U=2, max_lag_steps=2)), r"\(2\) is below R/U - 1 = 3"),
        (dict(rounds=rounds(R=6, U=2), run=sections.RunConfig(num_updates=100)), "multiple of the round's 3 updates"),
        (dict(packing=sections.PackingConfig(rows=3), mesh=sections.MeshConfig(data=2)), "multiple of mesh.data"),
        (
            dict(rounds=rounds(ess_floor=0.5), run=sections.RunConfig(num_updates=2)),
            "ess_floor requires publish.when=every",
        ),
        (
            dict(
                rounds=rounds(R=4, U=4, K=3, overprovision_prompts=1.25),
                admission=sections.AdmissionConfig(policy="window", sequences=14),
                publish=sections.PublishConfig(when="every"),
            ),
            "admission.sequences >= 5 groups of 3 sequences .* got 14",
        ),
    ],
)
def test_config_sections_that_do_not_fit_are_refused(fields, said):
    with pytest.raises(ValueError, match=said):
        Config(preset="test", **fields)


def test_config_lag_bound_of_a_rounds_last_update_is_accepted():
    # R/U = 4 updates at lags 0 to 3.
    Config(preset="test", rounds=rounds(R=8, U=2, max_lag_steps=3))


def test_config_by_window_num_updates_need_not_fill_rounds():
    Config(preset="test", rounds=rounds(R=6, U=2), run=sections.RunConfig(num_updates=100), **WINDOW)


@pytest.mark.parametrize(
    ("policy", "width", "want"),
    [("fifo", "auto", 0), ("frontier", "auto", 0), ("frontier", 5, 5), ("window", "auto", 12), ("window", 7, 7)],
)
def test_admission_width_auto_is_filled_in_from_the_policy(policy, width, want):
    when = "every" if policy == "window" else "round_end"
    config = Config(
        preset="test",
        run=sections.RunConfig(num_updates=2),
        rounds=rounds(R=6, U=3),
        admission=sections.AdmissionConfig(policy=policy, width=width),
        publish=sections.PublishConfig(when=when),
    )
    assert config.admission_width == want
    assert config.chooses_width == ((policy, width) == ("frontier", "auto"))


@pytest.mark.parametrize(("ratio", "width"), [(0.0, 2), (0.5, 3), (2.0, 6), (2.2, 6)])
def test_admission_width_of_an_async_ratio_is_its_buffer(ratio, width):
    admission = sections.AdmissionConfig(policy="window", async_ratio=ratio)
    config = Config(preset="test", rounds=rounds(), admission=admission, publish=sections.PublishConfig(when="every"))
    assert config.admission_width == width


def window(**admission) -> Config:
    fields: dict[str, Any] = WINDOW | dict(admission=sections.AdmissionConfig(policy="window", **admission))
    return Config(preset="test", rounds=rounds(R=4, U=2, K=3), **fields)


def test_sequences_and_waiting_groups_of_a_window_are_filled_in():
    default = window()
    assert (default.sequences, default.queue_groups, default.max_ready_groups) == (8 * 3, 2, None)
    assert window(width=5).sequences == 15 and window(sequences=7).sequences == 7
    buffered = window(async_ratio=1.5)
    assert (buffered.sequences, buffered.queue_groups) == (5 * 3, 5)
    assert window(when_full="drop_oldest", queue_groups=4).max_ready_groups == 4


def test_sequences_of_a_window_hold_redundant_ones_and_its_buffer_those_that_win():
    admission = sections.AdmissionConfig(policy="window", async_ratio=1.0)
    redundant = rounds(R=4, U=4, K=3, overprovision_prompts=1.5, overprovision_samples=1.3)
    fields: dict[str, Any] = WINDOW | {"admission": admission}
    config = Config(preset="test", rounds=redundant, **fields)
    assert (config.sequences, config.queue_groups) == (2 * 6 * 4, 2 * 4)


def test_lag_bound_is_the_stricter_of_alpha_rounded_up_and_the_hard_bound():
    assert window().max_lag_steps is None and window(async_ratio=1.5).max_lag_steps == 2
    both = dataclasses.replace(window(async_ratio=1.5), rounds=rounds(R=4, U=2, K=3, max_lag_steps=1))
    assert both.max_lag_steps == 1


def test_async_ratio_below_the_lag_of_the_newest_weights_is_refused():
    with pytest.raises(ValueError, match=r"async_ratio \(1\) is below publish.every_n_steps - 1 = 2"):
        dataclasses.replace(window(async_ratio=1.0), publish=sections.PublishConfig(when="every", every_n_steps=3))


@pytest.mark.parametrize(("eta", "issued", "requests"), [(1.0, 4, 10), (1.1, 5, 11), (1.25, 5, 13), (1.5, 6, 15)])
def test_overprovision_rounds_up(eta, issued, requests):
    r = rounds(R=4, U=4, K=10, overprovision_prompts=eta, overprovision_samples=eta)
    assert (r.groups_issued, r.requests_per_group) == (issued, requests)


def test_parity_bound_zero_is_filled_in_from_the_served_dtype():
    config = Config(preset="test")
    bf16 = dataclasses.replace(config, model=sections.ModelConfig(served_dtype="bfloat16"))
    given = dataclasses.replace(bf16, publish=sections.PublishConfig(parity_bound=0.5))
    assert (config.parity_bound, bf16.parity_bound, given.parity_bound) == (1e-4, 0.25, 0.5)


ADAM_FIELDS = {"beta1": 0.5, "beta2": 0.9, "eps": 1e-6, "mu_dtype": "bfloat16", "nu_dtype": "bfloat16"}


@pytest.mark.parametrize(
    "name,field,value", [*(("adafactor", *item) for item in ADAM_FIELDS.items()), ("adamw", "momentum", 0.9)]
)
def test_optimizer_field_that_the_optimizer_does_not_read_is_refused(name, field, value):
    sections.OptimizerConfig(name="muon", **{field: value})
    with pytest.raises(ValueError, match=f"optimizer.{field}={value} has no effect with optimizer.name={name}"):
        sections.OptimizerConfig(name=name, **{field: value})


def test_adapters_are_published_alone_only_where_there_are_some_and_their_keys_stay():
    alone = sections.PublishConfig(lora="adapter")
    with pytest.raises(ValueError, match="publish.lora=adapter requires lora.rank"):
        Config(preset="t", publish=alone)
    lora = sections.LoraConfig(rank=8)
    with pytest.raises(ValueError, match="kv_cache=recompute has no effect with publish.lora=adapter"):
        Config(preset="t", publish=dataclasses.replace(alone, kv_cache="recompute"), lora=lora)
    assert Config(preset="t", publish=alone, lora=lora).publishes_adapters
    assert not Config(preset="t", lora=lora).publishes_adapters


def test_lora_scale_modules_and_the_dtype_of_the_base():
    lora = sections.LoraConfig(rank=16, alpha=8.0, targets="down,q")
    assert lora.scale == 0.5 and lora.modules == ("q_proj", "down_proj")
    assert dataclasses.replace(lora, rank_stabilized=True).scale == 2.0
    assert sections.LoraConfig().modules == ()
    served: dict[tuple[Any, Any], str]
    served = {("float32", "bfloat16"): "float32", ("bfloat16", "bfloat16"): "bfloat16"}
    for (compute, out), wanted in served.items():
        model = sections.ModelConfig(compute_dtype=compute, served_dtype=out)
        assert Config(preset="t", model=model).base_dtype == wanted


@pytest.mark.parametrize(("train_start", "num_processes"), [("group_ready", 1), ("round_complete", 2)])
def test_devices_are_shared_by_one_learner_process_that_trains_whole_rounds(train_start, num_processes):
    config = rolloutpipe.colocated("tiny")
    with pytest.raises(ValueError, match="actor.colocated requires rounds.train_start=round_complete"):
        dataclasses.replace(
            config,
            rounds=dataclasses.replace(config.rounds, train_start=train_start),
            mesh=sections.MeshConfig(fsdp=2),
            learner=sections.LearnerConfig(num_processes=num_processes),
        )


def helped(**fields):
    config = rolloutpipe.cgp("tiny")
    one_update = dataclasses.replace(config.rounds, groups_per_update=config.rounds.groups_per_round)
    config = dataclasses.replace(config, rounds=one_update)
    return dataclasses.replace(config, helpers=sections.HelpersConfig(num_engines=1), **fields)


def test_helper_may_go_with_shared_devices():
    config = helped()
    assert config.shares_devices and not rolloutpipe.cgp("tiny").shares_devices
    assert helped(actor=dataclasses.replace(config.actor, colocated=True)).shares_devices


@pytest.mark.parametrize(
    ("section", "fields"),
    [
        ("rounds", {"groups_per_update": 16}),
        ("rounds", {"train_start": "round_complete"}),
        ("rounds", {"epochs": 2}),
    ],
)
def test_helper_needs_one_update_a_round_trained_as_groups_arrive(section, fields):
    changed = dataclasses.replace(getattr(helped(), section), **fields)
    with pytest.raises(ValueError, match="helpers.num_engines requires one update per round"):
        helped(**{section: changed})


def test_helper_computes_with_what_is_published():
    model = dataclasses.replace(helped().model, served_dtype="bfloat16", compute_dtype="float32")
    with pytest.raises(ValueError, match="requires model.served_dtype=model.compute_dtype, got bfloat16 and float32"):
        helped(model=model)
    assert helped(model=model, lora=sections.LoraConfig(rank=2)).helpers.num_engines == 1


def test_helper_holds_no_teacher():
    with pytest.raises(ValueError, match="helpers.num_engines=1 requires loss.teacher_coef=0"):
        helped(loss=sections.LossConfig(teacher_coef=1.0, teacher_path="m"))
