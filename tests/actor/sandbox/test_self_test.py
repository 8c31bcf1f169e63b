import pytest

from actor.sandbox import bwrap, self_test
from actor.sandbox.program import SandboxLimits, SandboxUnavailableError
from actor.sandbox.self_test import check_isolation, missing

REFUSED = "bwrap: No permissions to create new namespace, likely because the kernel does not allow\nnon-privileged"


@pytest.mark.heavy
def test_machine_without_bubblewrap_says_how_to_get_it(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(
        SandboxUnavailableError, match=r"^programs cannot be isolated on this machine: .*apt-get install bubblewrap"
    ):
        check_isolation()


@pytest.mark.parametrize(
    ("forbidding", "advice"),
    [
        ({"kernel/unprivileged_userns_clone": "0\n"}, "sysctl -w kernel.unprivileged_userns_clone=1"),
        ({"user/max_user_namespaces": "0\n"}, "sysctl -w user.max_user_namespaces"),
        ({"kernel/apparmor_restrict_unprivileged_userns": "1\n"}, "apparmor_restrict_unprivileged_userns=0"),
        ({"kernel/unprivileged_userns_clone": "1\n", "user/max_user_namespaces": "100\n"}, "CAP_SYS_ADMIN"),
    ],
)
def test_advice_is_of_what_this_machine_forbids_and_one_line(forbidding, advice):
    said = missing(REFUSED, read=lambda name: forbidding.get(name, ""))
    assert advice in said and "No permissions to create new namespace" in said and "\n" not in said


def test_old_bubblewrap_is_named():
    assert "older than 0.8" in missing("bwrap: Unknown option --size")


def test_what_nobody_foresaw_is_told_as_it_is():
    assert missing("bwrap: Out of disk\n") == "bwrap: Out of disk"


@pytest.mark.integration
def test_this_machine_isolates(isolated):
    found = check_isolation()
    assert "python3" in found.tools and found.is_root == bwrap.mode().is_root


WALLS = {
    "--unshare-net": ([], "a listener of the host can be reached by AF_UNIX; network devices exist"),
    "--unshare-pid": ([], "other processes|cannot be isolated"),
    "--seccomp": ([], "not filtered by seccomp.*ptrace is open"),
    "--remount-ro": (["--perms", "1777", "--tmpfs", "/etc"], "/etc can be written to"),
}
"""What is left out, what is put in, and what is said about it."""


@pytest.mark.integration
@pytest.mark.parametrize("wall", WALLS)
def test_sandbox_without_a_wall_is_found_out(isolated, monkeypatch, wall):
    whole = bwrap.command_line
    more, said = WALLS[wall]

    def without(**arguments):
        argv = whole(**arguments)
        while wall in argv:
            at = argv.index(wall)
            del argv[at : at + (1 if wall.startswith("--unshare") else 2)]
        at = argv.index("--clearenv")
        return [*argv[:at], *more, *argv[at:]]

    monkeypatch.setattr(bwrap, "command_line", without)
    with pytest.raises(SandboxUnavailableError, match=said):
        check_isolation()


@pytest.mark.integration
def test_sandbox_whose_programs_have_our_environment_is_found_out(isolated, monkeypatch):
    monkeypatch.setattr(bwrap, "environment", lambda view: {"PATH": "/usr/bin", "SECRET": "1"})
    with pytest.raises(SandboxUnavailableError, match="the environment has SECRET"):
        check_isolation()


@pytest.mark.integration
def test_sandbox_that_shows_a_file_of_the_hosts_is_found_out(isolated, monkeypatch):
    whole = bwrap.command_line

    def with_tmp(**arguments):
        argv = whole(**arguments)
        at = argv.index("--symlink", argv.index("--proc"))
        return [*argv[:at], "--ro-bind", "/tmp", "/tmp", *argv[at + 3 :]]

    monkeypatch.setattr(bwrap, "command_line", with_tmp)
    with pytest.raises(SandboxUnavailableError, match="a file of the host can be read|another"):
        check_isolation()


@pytest.mark.integration
def test_sandbox_whose_processes_get_too_much_memory_together_is_found_out(isolated, monkeypatch):
    monkeypatch.setattr(self_test.dataclasses, "replace", lambda limits, **changed: limits)
    monkeypatch.setattr(self_test, "TIMEOUT_S", 3.0)
    limits = SandboxLimits(memory_bytes=2**40, address_space_bytes=2**30)
    with pytest.raises(SandboxUnavailableError, match="more memory in total"):
        check_isolation(limits)
