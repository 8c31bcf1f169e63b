"""Names and numbers that a cluster refuses are refused by their flag; those that it takes are rendered as they are."""

import math

import pytest

from tests.launch.tools.deploy.cases import KUBERNETES, SLURM, settings

CLUSTER = {**KUBERNETES, "learner": "h100", "actors": "h100"}
BATCH = {**SLURM, "learner": "h100", "actors": "h100"}
HASH = "a1" * 32


@pytest.mark.parametrize(
    ("flag", "values"),
    [
        ("namespace", ["Team_A", "a b", "", "-a", "a-", "a.b", "a" * 64, "a\n", "team/a", "ä"]),
        ("storage_claim", ["My_Claim", "a b", "-a", "a-", "a..b", ".a", "a.", "a" * 254, "a/b", "a\n"]),
        ("service_account", ["x/y", "Runner", "a_b", "a@b.iam", "a.-b"]),
        (
            "learner_image",
            [
                *("registry/My Image:1", "registry/MyImage:1", "a:b:c", "a:", "a@sha256:12", "/a", "a//b", "a:-1"),
                *(f"a:{'t' * 129}", "a" * 256, "a\n", "https://registry/a"),
            ],
        ),
        ("actor_image", ["registry/My Image:1", "Image", "-a"]),
        (
            "mount",
            [
                *("a", "/", "", "/a:b", "/a/../b", "/tmp", "/dev", "/etc", "/etc/sluice", "/etc/sluice/x"),
                *("/etc/sluice-secrets/x", "/dev/shm", "/a\n", "//a"),
            ],
        ),
        ("uid", [-1, 2**31]),
        ("num_actors", [-1, 2**31]),
        ("num_params", [-1.0, math.nan, math.inf]),
        ("grace_s", [29.0, math.nan, math.inf, 1e12]),
        ("port", [0, 65536, 8476, 8471]),
        ("actor_user", ["", "a\n"]),
    ],
)
def test_name_or_number_that_kubernetes_refuses_is_refused_by_its_flag(flag, values):
    for value in values:
        says = f"--{flag}" if value or flag not in ("storage_claim", "learner_image", "actor_image") else flag
        with pytest.raises(ValueError, match=says) as refused:
            settings({**CLUSTER, flag: value})
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("flag", "values"),
    [
        ("namespace", ["default", "team-a", "7", "a" * 63]),
        ("storage_claim", ["shared", "a.b-c.d", "0", "a" * 253]),
        ("service_account", ["", "runner", "runner.prod"]),
        (
            "learner_image",
            [
                *("sluice", "sluice:1", "REGISTRY/sluice-learner:TAG"),
                *("registry.example:5000/team/sluice_learner:V1.0-rc_2", "localhost/a/b/c:latest", "[::1]:5000/a"),
                *(f"gcr.io/p/a@sha256:{HASH}", f"gcr.io/p/a:1@sha256:{HASH}", "a--b/c__d.e"),
            ],
        ),
        ("mount", ["/sluice", "/mnt/shared-1/a.b", "/tmp/below"]),
        ("uid", [0, 10001, 2**31 - 1]),
        ("port", [443, 8443, 65535]),
    ],
)
def test_name_that_kubernetes_takes_is_taken(flag, values):
    for value in values:
        assert getattr(settings({**CLUSTER, flag: value}), flag) == value


@pytest.mark.parametrize("time", ["24:00:00", "90", "2-12", "2-12:30:00", "infinite", "30:00"])
def test_slurm_takes_its_forms_of_a_time(time):
    assert settings({**BATCH, "time": time}).time == time


@pytest.mark.parametrize("given", [{"time": "1 day"}, {"time": ""}, {"time": "1\n#SBATCH --x"}, {"python": "/a\nb"}])
def test_slurm_refuses_what_would_be_another_line_of_a_script(given):
    with pytest.raises(ValueError, match=f"--{next(iter(given))}"):
        settings({**BATCH, **given})
