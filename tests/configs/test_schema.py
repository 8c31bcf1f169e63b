import dataclasses
from typing import Any

import pytest

from configs import sections
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
        ("PromptsConfig", dict(pattern="("), "no regular expression"),
        ("SamplingConfig", dict(top_p=0.9), "top_p=0.9"),
        ("SamplingConfig", dict(temperature=0.0), "sampling.temperature"),
        ("RoundsConfig", dict(samples_per_group=1), r"\(K\) must be >= 2"),
        ("RoundsConfig", dict(groups_per_round=10, groups_per_update=4), r"U=4.*must divide.*R=10"),
        ("RoundsConfig", dict(max_lag_steps=-1), "max_lag_steps"),
        ("RoundsConfig", dict(overprovision_prompts=0.9), "rounds.overprovision_prompts must be between 1"),
        ("RoundsConfig", dict(overprovision_samples=5.0), "rounds.overprovision_samples must be between 1"),
        ("RoundsConfig", dict(ess_floor=1.0), "rounds.ess_floor"),
        ("AdmissionConfig", dict(policy="fifo", async_ratio=1.0), "async_ratio needs admission.policy=window"),
        ("AdmissionConfig", dict(policy="window", async_ratio=-1.0), "admission.async_ratio"),
        ("AdmissionConfig", dict(policy="fifo", when_full="drop_oldest"), "drop_oldest needs admission.policy=window"),
        ("AdmissionConfig", dict(policy="window", queue_groups=4), "queue_groups has no effect"),
        ("PublishConfig", dict(kv_cache="recompute", at_publish="drain"), "recompute has no effect"),
        ("ActorConfig", dict(tensor_parallel_size=4, max_tensor_parallel_size=2), "max_tensor_parallel_size"),
        ("PublishConfig", dict(every_n_steps=0), "every_n_steps"),
        ("LossConfig", dict(clip_low=1.5), "clip_low"),
        ("LossConfig", dict(clip_high=-0.1), "clip_high"),
        ("LossConfig", dict(clip_high=float("inf")), "loss.clip_high must be finite"),
        ("LossConfig", dict(dual_clip=1.0), "loss.dual_clip must be > 1"),
        ("LossConfig", dict(name="truncated_is", max_weight=0.0), "loss.max_weight must be > 0, got 0"),
        ("LossConfig", dict(name="masked_is", min_weight=3.0), "loss.min_weight < loss.max_weight, got 3.0 and 2.0"),
        ("LossConfig", dict(advantage_eps=0.0), "loss.advantage_eps must be > 0"),
        ("LossConfig", dict(kl_coef=-1.0), "loss.kl_coef must be >= 0"),
        ("LossConfig", dict(entropy_coef=float("nan")), "loss.entropy_coef must be finite"),
        ("LossConfig", dict(overlong_buffer_tokens=-1), "loss.overlong_buffer_tokens must be >= 0"),
        ("OptimizerConfig", dict(beta2=1.0), "betas"),
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
        (dict(evaluation=sections.EvaluationConfig(num_problems=0)), "set publish.probe_every_n_publishes=0 too"),
        (dict(sampling=sections.SamplingConfig(max_response_tokens=64)), "leave room for a"),
        (dict(admission=sections.AdmissionConfig(policy="window")), "go together"),
        (dict(publish=sections.PublishConfig(when="every")), "go together"),
        (WINDOW | dict(rounds=rounds(train_start="round_complete")), "needs publish.when=round_end"),
        (WINDOW | dict(admission=sections.AdmissionConfig(policy="window", width=1), rounds=rounds()), "never fills"),
        (dict(rounds=rounds(R=8, U=2, max_lag_steps=2)), r"\(2\) is below R/U - 1 = 3"),
        (dict(rounds=rounds(R=6, U=2), run=sections.RunConfig(num_updates=100)), "multiple of the round's 3 updates"),
        (dict(packing=sections.PackingConfig(rows=3), mesh=sections.MeshConfig(data=2)), "multiple of mesh.data"),
        (
            dict(rounds=rounds(ess_floor=0.5), run=sections.RunConfig(num_updates=2)),
            "ess_floor needs publish.when=every",
        ),
        (
            WINDOW | dict(rounds=rounds(overprovision_prompts=1.25)),
            "overprovision_prompts needs publish.when=round_end",
        ),
        (
            WINDOW
            | dict(
                rounds=rounds(R=4, U=4),
                admission=sections.AdmissionConfig(policy="window", when_full="drop_oldest", queue_groups=3),
            ),
            r"queue_groups \(3\) must be at least rounds.groups_per_update \(4\)",
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
    [("fifo", 0, 0), ("frontier", 0, 3), ("frontier", 5, 5), ("window", 0, 12), ("window", 7, 7)],
)
def test_admission_width_zero_is_filled_in_from_the_policy(policy, width, want):
    when = "every" if policy == "window" else "round_end"
    config = Config(
        preset="test",
        run=sections.RunConfig(num_updates=2),
        rounds=rounds(R=6, U=3),
        admission=sections.AdmissionConfig(policy=policy, width=width),
        publish=sections.PublishConfig(when=when),
    )
    assert config.admission_width == want


@pytest.mark.parametrize(("ratio", "width"), [(0.0, 2), (0.5, 3), (2.0, 6), (2.2, 6)])
def test_admission_width_of_an_async_ratio_is_its_buffer(ratio, width):
    admission = sections.AdmissionConfig(policy="window", async_ratio=ratio)
    config = Config(preset="test", rounds=rounds(), admission=admission, publish=sections.PublishConfig(when="every"))
    assert config.admission_width == width


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
        (dict(name="tis", clip_low=0.2), "loss.name=tis and loss.proximal=update.*or set loss.proximal=round"),
        (dict(proximal="round"), "proximal=round has no effect without loss.name of decoupled_ppo, tis, masked_is"),
        (dict(advantage="rloo", advantage_eps=0.1), "advantage_eps=0.1 has no effect without loss.advantage=grpo"),
        (dict(kl_estimator="k1"), "kl_estimator=k1 has no effect without loss.kl_coef > 0"),
        (dict(reference_path="m"), "reference_path=m has no effect without loss.kl_coef > 0"),
        (dict(overlong_penalty=2.0), "overlong_penalty=2.0 has no effect without loss.overlong_buffer_tokens > 0"),
    ],
)
def test_loss_constant_that_nothing_reads_is_refused(fields, said):
    with pytest.raises(ValueError, match=said):
        sections.LossConfig(**fields)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (dict(name="dr_grpo"), "wants loss.advantage=dr_grpo and loss.normalization=constant, got loss.advantage=grpo"),
        (dict(name="dr_grpo", advantage="dr_grpo"), "got loss.normalization=token"),
        (dict(name="dapo", normalization="sequence"), "wants loss.advantage=grpo and loss.normalization=token"),
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


def test_loss_dr_grpo_takes_either_name_of_its_advantage():
    for advantage in ("dr_grpo", "mean_baseline"):
        sections.LossConfig(name="dr_grpo", advantage=advantage, normalization="constant")


@pytest.mark.parametrize("field,value", [("beta1", 0.5), ("beta2", 0.9), ("eps", 1e-6), ("mu_dtype", "bfloat16")])
def test_optimizer_field_that_adafactor_does_not_read_is_refused(field, value):
    sections.OptimizerConfig(**{field: value})
    with pytest.raises(ValueError, match=f"optimizer.{field}={value} has no effect with optimizer.name=adafactor"):
        sections.OptimizerConfig(name="adafactor", **{field: value})
