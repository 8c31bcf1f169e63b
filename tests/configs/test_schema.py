import dataclasses
from typing import Any

import pytest

from configs import sections
from configs.presets import rolloutpipe
from configs.schema import Config
from configs.sections.prompts import PromptSource
from configs.sections.teacher import Teacher


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


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            dict(max_weight=2.0),
            r"max_weight=2.0 has no effect with loss.name=grpo_clip, which reads clip_low, clip_high",
        ),
        (dict(name="truncated_is", clip_high=0.28), "clip_high=0.28 has no effect with loss.name=truncated_is"),
        (dict(name="gspo", dual_clip=3.0), "dual_clip=3.0 has no effect"),
        (dict(name="topr", clip_low=0.2), "clip_low=0.2 has no effect"),
        (dict(name="tis", min_weight=0.5), "min_weight=0.5 has no effect"),
        (
            dict(proximal="round"),
            "proximal=round has no effect without loss.name of ppo_clip, decoupled_ppo, tis, masked_is or loss.corr",
        ),
        (dict(advantage="rloo", advantage_eps=0.1), "advantage_eps=0.1 has no effect without loss.advantage=grpo"),
        (dict(advantage="rloo", advantage_std="population"), "advantage_std=population has no effect without loss.adv"),
        (dict(turn_discount=0.9), "turn_discount=0.9 has no effect without loss.advantage=turn_grpo"),
        (dict(advantage="rloo", turn_discount=0.9), "turn_discount=0.9 has no effect without loss.advantage=turn_grpo"),
        (dict(kl_estimator="k1"), "kl_estimator=k1 has no effect without loss.kl_coef > 0"),
        (dict(reference_path="m"), "reference_path=m has no effect without loss.kl_coef > 0"),
        (dict(teacher_path="m"), "teacher_path=m has no effect without loss.teacher_coef > 0"),
        (dict(teachers={"a": Teacher(path="m")}), "loss.teachers has no effect without loss.teacher_coef > 0"),
        (dict(teacher_coef=1.0), "loss.teacher_coef=1.0 requires a teacher; set loss.teacher_path or loss.teachers"),
        (dict(advantage="none"), "loss.advantage=none leaves nothing to learn from"),
        (dict(teacher_coef=1.0, teachers={"a": Teacher()}), "loss.teachers.a.path: expected a model folder, got none"),
        (dict(teacher_coef=1.0, teachers={"a.b": Teacher(path="m")}), "loss.teachers: expected a name .* got 'a.b'"),
        (dict(overlong_penalty=2.0), "overlong_penalty=2.0 has no effect without loss.overlong_buffer_tokens > 0"),
    ],
)
def test_loss_constant_that_nothing_reads_is_refused(fields, said):
    with pytest.raises(ValueError, match=said):
        sections.LossConfig(**fields)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            dict(name="dr_grpo"),
            "requires loss.advantage=dr_grpo and loss.normalization=constant, got loss.advantage=grpo",
        ),
        (dict(name="dr_grpo", advantage="dr_grpo", normalization="token"), "got loss.normalization=token"),
        (
            dict(name="gspo", normalization="token"),
            "requires loss.normalization=sequence, got loss.normalization=token",
        ),
        (dict(name="gspo", normalization="sequence_sum"), "got loss.normalization=sequence_sum"),
        (dict(name="gspo", normalization="constant"), "got loss.normalization=constant"),
        (dict(name="dapo", normalization="sequence"), "requires loss.advantage=grpo and loss.normalization=token"),
        (dict(name="dapo", advantage="turn_grpo"), "requires loss.advantage=grpo .*, got loss.advantage=turn_grpo"),
        (dict(name="dapo", length_penalty=0.5), "requires .*loss.length_penalty=0.0, got loss.length_penalty=0.5"),
        (dict(name="dapo", overlong_buffer_tokens=0), "dapo includes the overlong penalty"),
    ],
)
def test_loss_name_of_a_whole_method_refuses_half_of_it(fields, said):
    with pytest.raises(ValueError, match=said):
        sections.LossConfig(**fields)


def test_loss_constants_are_the_losses_own_until_they_are_given():
    assert sections.LossConfig(name="gspo").constants == {"clip_low": 3e-4, "clip_high": 4e-4}
    assert sections.LossConfig(name="gspo", clip_high=1e-3).constants == {"clip_low": 3e-4, "clip_high": 1e-3}
    assert sections.LossConfig(name="tis", proximal="round", dual_clip=3.0).constants == {
        "clip_low": 0.2,
        "clip_high": 0.2,
        "dual_clip": 3.0,
        "max_weight": 2.0,
    }
    other = dataclasses.replace(sections.LossConfig(), name="gspo")  # another name brings its own constants
    assert other.constants == {"clip_low": 3e-4, "clip_high": 4e-4}


def test_config_evaluation_may_be_greedy():
    sections.EvaluationConfig(temperature=0.0)


def test_config_dapo_with_its_dynamic_sampling_is_whole():
    loss = sections.LossConfig(name="dapo", overlong_buffer_tokens=4)
    Config(
        preset="test",
        loss=loss,
        rounds=rounds(filter_zero_variance=True),
        run=sections.RunConfig(num_updates=2),
    )


@pytest.mark.parametrize(
    ("fields", "want"),
    [
        (dict(), "token"),
        (dict(name="truncated_is"), "token"),
        (dict(name="gspo"), "sequence"),
        (dict(name="gspo", normalization="sequence"), "sequence"),
        (dict(name="dr_grpo", advantage="dr_grpo"), "constant"),
        (dict(normalization="sequence_sum"), "sequence_sum"),
    ],
)
def test_loss_normalization_is_the_losses_own_until_it_is_given(fields, want):
    assert sections.LossConfig(**fields).normalized_by == want


def test_loss_by_turns_reads_the_constants_of_grpo():
    loss = sections.LossConfig(advantage="turn_grpo", advantage_eps=0.1, advantage_std="population", turn_discount=0.5)
    assert (loss.advantage_eps, loss.advantage_std, loss.turn_discount) == (0.1, "population", 0.5)


def test_loss_dr_grpo_takes_either_name_of_its_advantage():
    for advantage in ("dr_grpo", "mean_baseline"):
        sections.LossConfig(name="dr_grpo", advantage=advantage, normalization="constant")


def with_loss(*, window: bool, epochs=1, U=2, every_n_steps=1, **loss):
    """A run of R = 4 by rounds, or one that publishes every n steps."""
    by_window: dict[str, Any] = {
        "admission": sections.AdmissionConfig(policy="window"),
        "publish": sections.PublishConfig(when="every", every_n_steps=every_n_steps),
    }
    return Config(
        preset="test",
        rounds=rounds(R=4, U=U, epochs=epochs),
        loss=sections.LossConfig(**loss),
        **(by_window if window else {}),
    )


@pytest.mark.parametrize(("name", "max_weight"), [("decoupled_ppo", 5), ("tis", 2)])
@pytest.mark.parametrize(
    ("fields", "ways"),
    [
        (dict(window=True), "loss.proximal=batch.*rounds.epochs=2, or loss.proximal=published with publish.every"),
        (dict(window=True, every_n_steps=4), "loss.proximal=batch.*rounds.epochs=2"),
        (dict(window=True, proximal="published"), "loss.proximal=published.*with publish.every_n_steps=2"),
        (dict(window=False), "loss.proximal=batch.*loss.proximal=round with rounds.groups_per_update below"),
        (dict(window=False, U=4), "loss.proximal=batch.*rounds.epochs=2"),
        (dict(window=False, proximal="round", U=4), "loss.proximal=round.*rounds.groups_per_update below"),
    ],
)
def test_loss_that_would_be_truncated_is_is_refused_in_one_line(name, max_weight, fields, ways):
    with pytest.raises(ValueError, match=f"loss.name={name} would be .*truncated_is.*={max_weight}, .*{ways}") as e:
        with_loss(name=name, **fields)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("name", ["decoupled_ppo", "tis", "masked_is"])
@pytest.mark.parametrize(
    ("fields", "steps"),
    [
        (dict(window=True, epochs=2), 2),
        (dict(window=True, epochs=3, every_n_steps=4), 3),
        (dict(window=True, proximal="published", every_n_steps=2), 2),
        (dict(window=True, proximal="published", every_n_steps=3, epochs=2), 6),
        (dict(window=True, proximal="published", epochs=2), 2),
        (dict(window=False, epochs=2), 2),
        (dict(window=False, proximal="round"), 2),
        (dict(window=False, proximal="round", U=4, epochs=2), 2),
        (dict(window=False, proximal="round", U=1, epochs=2), 8),
    ],
)
def test_loss_with_several_optimizer_steps_for_each_proximal_policy_is_accepted(name, fields, steps):
    assert with_loss(name=name, clip_low=0.1, **fields).steps_per_proximal == steps


@pytest.mark.parametrize("window", [True, False])
def test_loss_masked_is_alone_needs_no_second_step_but_its_clip_does(window):
    assert with_loss(window=window, name="masked_is").steps_per_proximal == 1
    with pytest.raises(ValueError, match="loss.clip_low=0.2 has no effect: .*Leave it out .* or set rounds.epochs=2"):
        with_loss(window=window, name="masked_is", clip_low=0.2)


@pytest.mark.parametrize(
    ("window", "proximal", "said"),
    [
        (True, "round", "proximal=round requires publish.when=round_end, got every. Set loss.proximal=published"),
        (False, "published", "proximal=published requires publish.when=every, got round_end. Set loss.proximal=round"),
    ],
)
def test_loss_proximal_of_the_other_way_to_publish_is_refused(window, proximal, said):
    with pytest.raises(ValueError, match=said):
        with_loss(window=window, name="tis", proximal=proximal, epochs=2)


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


@pytest.mark.parametrize(
    ("packing", "veto", "said"),
    [
        (dict(), "group", "loss.correction.veto=group requires packing.whole_groups=True"),
        (dict(whole_groups=True, auto=True), "off", "packing.whole_groups requires packing.auto=False"),
        # Two rows of 100 tokens hold 2 x 2 sequences of 50 tokens, and of one segment per row 2 x 1.
        (dict(whole_groups=True, rows=2, row_tokens=100), "group", "expected room for 5 sequences .*, got 4. Raise"),
        (dict(whole_groups=True, rows=4, row_tokens=100, max_row_sequences=1), "off", "room for 5 .*, got 4"),
        (dict(whole_groups=True, rows=3, row_tokens=100), "group", None),
    ],
)
def test_whole_groups_need_room_for_a_group_of_longest_sequences(packing, veto, said):
    fields: dict[str, Any] = dict(
        packing=sections.PackingConfig(**packing),
        loss=sections.LossConfig(correction=sections.CorrectionConfig(veto=veto)),
        model=sections.ModelConfig(max_tokens=50),
        sampling=sections.SamplingConfig(max_response_tokens=20),
        rounds=rounds(K=5),
    )
    if said is None:
        assert Config(preset="", **fields).packing.whole_groups
        return
    with pytest.raises(ValueError, match=said):
        Config(preset="", **fields)


def test_weight_on_a_loss_with_a_ratio_to_mu_is_refused():
    weighted = sections.CorrectionConfig(weight="token")
    with pytest.raises(ValueError, match="loss.correction.weight=token would correct loss.name=grpo_clip twice"):
        sections.LossConfig(correction=weighted)
    assert sections.LossConfig(name="reinforce", correction=weighted).corrects_by_proximal


def test_ppo_clip_whose_clip_is_never_reached_is_refused():
    with pytest.raises(ValueError, match="loss.name=ppo_clip would have the gradient of loss.name=reinforce"):
        Config(preset="", loss=sections.LossConfig(name="ppo_clip"))


def test_correction_by_the_proximal_policy_reads_loss_proximal():
    rejects = sections.CorrectionConfig(reject="token")
    assert sections.LossConfig(correction=rejects, proximal="round").proximal == "round"
    with pytest.raises(ValueError, match="loss.proximal=round has no effect"):
        sections.LossConfig(correction=sections.CorrectionConfig(reject="token", policy="current"), proximal="round")


TWO_TEACHERS: dict[str, Any] = dict(teacher_coef=1.0, teachers={"a": Teacher(path="m"), "b": Teacher(path="n")})


def sources_of(*teachers):
    sources = {f"s{i}": PromptSource(path=f"{i}.jsonl", teacher=name) for i, name in enumerate(teachers)}
    return sections.PromptsConfig(mixture=sources)


@pytest.mark.parametrize(
    ("loss", "prompts", "said"),
    [
        (TWO_TEACHERS, sections.PromptsConfig(), "loss.teachers.a teaches no row; name it in prompts.mixture.NAME"),
        (TWO_TEACHERS, sources_of("a", "a"), "loss.teachers.b teaches no row"),
        (TWO_TEACHERS, sources_of("a", "c"), r"prompts.mixture.s1.teacher: expected one of .*\(a, b\), got 'c'"),
        ({}, sources_of("a"), "prompts.mixture.s0.teacher: expected one of loss.teachers"),
        ({}, sections.PromptsConfig(teacher_field="t"), "prompts.teacher_field=t requires loss.teachers"),
        (
            TWO_TEACHERS | dict(advantage="none"),
            sources_of("a", "b", ""),
            "teacher for every row; .* prompts.mixture .none: s2",
        ),
    ],
)
def test_teachers_and_rows_that_do_not_meet_are_refused(loss, prompts, said):
    with pytest.raises(ValueError, match=said):
        Config(preset="test", loss=sections.LossConfig(**loss), prompts=prompts)


def test_teachers_are_numbered_by_name_after_that_of_rows_without_one():
    loss = sections.LossConfig(**TWO_TEACHERS, teacher_path="p")
    Config(preset="test", loss=loss, prompts=sources_of("b", "a", ""))
    assert [loss.teacher_number(name) for name in ("", "a", "b")] == [1, 2, 3]
    assert list(loss.teacher_folders.values()) == [
        ("loss.teacher_path", "p"),
        ("loss.teachers.a.path", "m"),
        ("loss.teachers.b.path", "n"),
    ]
    with pytest.raises(ValueError, match="expected the row's teacher 'c', got , a, b"):
        loss.teacher_number("c")
    assert sections.LossConfig(**TWO_TEACHERS).teacher_number("") == 0


def test_helper_holds_no_teacher():
    with pytest.raises(ValueError, match="helpers.num_engines=1 requires loss.teacher_coef=0"):
        helped(loss=sections.LossConfig(teacher_coef=1.0, teacher_path="m"))
