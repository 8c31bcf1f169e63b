"""Config section of the objective: constants that losses read, and losses that would equal another."""

import dataclasses
from typing import Any

import pytest

from configs import sections
from configs.schema import Config
from configs.sections.prompts import PromptSource
from configs.sections.teacher import Teacher
from tests.configs.test_schema import rounds


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
        (dict(teacher_coef=1.0), "loss.teacher_coef=1.0 requires a teacher; set loss.teacher_path, loss.teacher"),
        (dict(advantage="none"), "loss.advantage=none leaves nothing to learn from"),
        (
            dict(teacher_coef=1.0, teachers={"a": Teacher()}),
            "loss.teachers.a.path: expected a model folder, or a server in loss.teachers.a.url",
        ),
        (
            dict(teacher_coef=1.0, teacher_path="m", teacher_url="http://h/v1"),
            "loss.teacher_path: expected none with loss.teacher_url, got 'm'",
        ),
        (dict(teacher_coef=1.0, teacher_url="h:8000"), "loss.teacher_url must be like http://127.0.0.1:8000/v1"),
        (dict(teacher_url="http://h/v1"), "teacher_url=http://h/v1 has no effect without loss.teacher_coef > 0"),
        (
            dict(teacher_divergence="forward_kl"),
            "teacher_divergence=forward_kl has no effect without loss.teacher_coef",
        ),
        (
            dict(teacher_coef=1.0, teacher_path="m", teacher_top_k=8),
            "teacher_top_k=8 has no effect without loss.teacher_divergence=reverse_kl or forward_kl",
        ),
        (
            dict(teacher_coef=1.0, teacher_path="m", teacher_divergence="kl"),
            "loss.teacher_divergence: expected one of sampled, reverse_kl, forward_kl, got 'kl'",
        ),
        (
            dict(teacher_coef=1.0, teacher_url="http://h/v1", teacher_divergence="forward_kl"),
            "forward_kl needs the teacher's distribution, .* in place of loss.teacher_url, or .*=sampled",
        ),
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
        (TWO_TEACHERS | dict(teacher_path="o"), sources_of("a", "b"), "loss.teacher_path teaches no row"),
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


def test_column_may_name_the_teachers_of_a_run_without_an_advantage():
    loss = sections.LossConfig(**TWO_TEACHERS, advantage="none")
    assert Config(preset="test", loss=loss, prompts=sections.PromptsConfig(teacher_field="t")).loss == loss


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


def test_teachers_on_servers_are_numbered_after_those_with_folders():
    named = {"a": Teacher(url="http://h/v1"), "b": Teacher(path="n")}
    loss = sections.LossConfig(teacher_coef=1.0, teacher_url="http://h:1/v1", teachers=named)
    assert [loss.teacher_number(name) for name in ("b", "", "a")] == [1, 2, 3]
    assert loss.teacher_folders == {"b": ("loss.teachers.b.path", "n")}
    assert loss.teacher_urls == {
        "": ("loss.teacher_url", "http://h:1/v1"),
        "a": ("loss.teachers.a.url", "http://h/v1"),
    }
    Config(preset="test", loss=dataclasses.replace(loss, advantage="none"), prompts=sources_of("b", "a", ""))


def test_teacher_on_a_server_requires_the_temperature_of_its_logprobs():
    loss = sections.LossConfig(teacher_coef=1.0, teacher_url="http://h/v1")
    with pytest.raises(ValueError, match="loss.teacher_url requires sampling.temperature=1, got 0.8"):
        Config(preset="test", loss=loss, sampling=sections.SamplingConfig(temperature=0.8))
