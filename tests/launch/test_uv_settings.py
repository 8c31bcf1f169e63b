"""Pip's configuration in uv's words."""

import pathlib
import subprocess
import sys

import pytest

from launch.uv_settings import read_settings, translate

REPO = pathlib.Path(__file__).resolve().parents[2]


def arguments(**settings: str) -> list[str]:
    return translate({name.replace("_", "-"): value for name, value in settings.items()}, {})[1][2:]


def test_settings_of_a_variable_go_before_those_of_files_and_of_install_before_all_commands():
    lines = [
        "global.index-url='https://a.example/simple'",
        "global.timeout='10'",
        "install.timeout='20'",
        "install.find-links='/file'",
        ":env:.find-links='/variable'",
        "download.no-index='true'",
    ]
    for order in (lines, lines[::-1]):
        assert read_settings([*order, ""]) == {
            "index-url": "https://a.example/simple",
            "timeout": "20",
            "find-links": "/variable",
        }


def test_line_that_is_no_setting_is_refused():
    with pytest.raises(ValueError, match="something else"):
        read_settings(["WARNING: something else"])


def test_sources_are_all_asked_and_the_best_version_is_taken_as_by_pip():
    assert translate({}, {}) == ({}, ["--index-strategy", "unsafe-best-match"])
    assert arguments(index_url="https://a.example", extra_index_url="https://b.example\nfile:///c d://e") == [
        *("--extra-index-url", "https://b.example", "--extra-index-url", "file:///c", "--extra-index-url", "d://e"),
        *("--default-index", "https://a.example"),
    ]
    assert arguments(find_links="/wheels", constraint="/one.txt /two.txt") == [
        *("--constraint", "/one.txt", "--constraint", "/two.txt", "--find-links", "/wheels"),
    ]
    assert arguments(only_binary="a,b", no_binary=":all:") == [
        *("--no-binary", ":all:", "--only-binary", "a", "--only-binary", "b"),
    ]


@pytest.mark.parametrize(("value", "given"), [("true", ["--no-index"]), ("1", ["--no-index"]), ("false", []), ("", [])])
def test_switch_is_given_where_it_is_on(value, given):
    assert arguments(no_index=value) == given


def test_certificates_proxy_and_timeout_are_variables_and_the_cache_is_apart_from_pips():
    variables, given = translate(
        {"cert": "/ca.pem", "proxy": "http://p:3128", "default-timeout": "180", "cache-dir": "/cache"}, {}
    )
    assert variables == {
        "SSL_CERT_FILE": "/ca.pem",
        "HTTP_PROXY": "http://p:3128",
        "HTTPS_PROXY": "http://p:3128",
        "UV_HTTP_TIMEOUT": "180",
    }
    assert given[2:] == ["--cache-dir", "/cache/uv"]


def test_bundle_of_certificates_that_pip_reads_from_the_environment_is_kept():
    assert translate({}, {"REQUESTS_CA_BUNDLE": "/ca.pem"})[0] == {"SSL_CERT_FILE": "/ca.pem"}
    assert translate({}, {"REQUESTS_CA_BUNDLE": "/ca.pem", "SSL_CERT_FILE": "/uvs.pem"})[0] == {}


def test_setting_without_a_counterpart_leaves_the_installation_to_pip():
    program = [sys.executable, "-I", str(REPO / "launch" / "uv_settings.py")]
    done = subprocess.run(program, input="global.require-hashes='true'\n", capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: uv has no counterpart of pip's setting require-hashes\n"
    done = subprocess.run(program, input=":env:.config-file='/x'\nglobal.cert='/a b'\n", capture_output=True, text=True)
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, "SSL_CERT_FILE=/a b")
