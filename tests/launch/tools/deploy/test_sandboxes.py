"""Code rewards on Kubernetes: refused, or in pods whose processes may make user namespaces."""

import json
import struct
import sys

import kubernetes_validate
import pytest

from actor.sandbox import bwrap
from launch.tools.deploy.deployment import Deployment, deploy
from tests.actor.sandbox.conftest import isolated as isolated
from tests.integration.support.processes import REPO, python
from tests.launch.tools.deploy.cases import KUBERNETES, config, settings
from tests.launch.tools.deploy.test_kubernetes import VERSION, pods

PROFILE = json.loads((REPO / "launch/tools/deploy/sandbox_seccomp.json").read_text())


def code(**more) -> Deployment:
    wanted = config("tiny_code", model__path="", actor__num_engines=1)
    return deploy(wanted, settings(KUBERNETES, num_params=0.0, **({"learner": "cpu", "actors": "cpu"} | more)))


@pytest.mark.parametrize("more", [{}, {"one_node": True, "actors": ""}])
def test_code_rewards_are_refused_at_rendering_with_the_flags_to_set(more):
    with pytest.raises(ValueError, match=r"--sandbox_seccomp=PROFILE .*--sandbox_runtime=RUNTIME_CLASS") as e:
        code(**more)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("more", [{}, {"one_node": True, "actors": ""}])
def test_pods_that_judge_and_no_others_may_make_user_namespaces(more):
    found = pods(code(sandbox_seccomp="sluice.json", **more))
    for name, spec in found.items():
        judges = "learner" not in name
        (container,) = spec["containers"]
        security = container["securityContext"]
        assert (spec.get("hostUsers") is False) == judges == (security.get("procMount") == "Unmasked"), name
        if judges:
            assert security["seccompProfile"] == {"type": "Localhost", "localhostProfile": "sluice.json"}
            assert security["appArmorProfile"] == {"type": "Unconfined"}
        assert security["allowPrivilegeEscalation"] is False and security["capabilities"] == {"drop": ["ALL"]}
        template = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": spec}
        kubernetes_validate.validate(template, VERSION, strict=True)


def test_pods_that_judge_are_of_the_runtime_class():
    found = pods(code(sandbox_runtime="gvisor"))
    assert {spec.get("runtimeClassName") for spec in found.values()} == {None, "gvisor"}


@pytest.mark.parametrize(
    "more",
    [{"sandbox_seccomp": "/etc/x.json"}, {"sandbox_seccomp": "../x"}, {"sandbox_seccomp": "a", "sandbox_runtime": "b"}],
)
def test_profiles_that_can_not_be_are_refused(more):
    with pytest.raises(ValueError, match="--sandbox_seccomp"):
        code(**more)


UNDER_THE_PROFILE = """
import ctypes, struct, sys
code = bytes.fromhex(sys.argv[1])
libc = ctypes.CDLL(None, use_errno=True)
held = ctypes.create_string_buffer(code)
program = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(held))
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program) == 0
assert libc.setns(-1, 0) == -1 and ctypes.get_errno() == 1
from actor.sandbox.self_test import check_isolation
check_isolation()
print("isolates")
"""


@pytest.mark.integration
def test_programs_can_be_isolated_under_the_profile(isolated):
    """It refuses what the sandbox's own filter refuses besides; loaded here by an assembler of its own."""
    table = dict((name, int(x86)) for name, x86, _ in map(str.split, (bwrap._REFUSED + "," + bwrap._ABSENT).split(",")))
    (refused,) = PROFILE["syscalls"]
    numbers = [table[name] for name in refused["names"]]
    assert PROFILE["defaultAction"] == "SCMP_ACT_ALLOW" and len(numbers) > 30
    if sys.platform != "linux" or bwrap.platform.machine() != "x86_64":
        pytest.skip("the numbers are those of x86_64")
    lines = [(0x20, 0, 0, 0)]
    for number in numbers:
        lines += [(0x15, 0, 1, number), (0x06, 0, 0, 0x00050001)]
    lines.append((0x06, 0, 0, 0x7FFF0000))
    program = b"".join(struct.pack("<HBBI", *line) for line in lines)
    done = python("-c", UNDER_THE_PROFILE, program.hex())
    assert done.stdout == "isolates\n", done.stderr[-2000:]
