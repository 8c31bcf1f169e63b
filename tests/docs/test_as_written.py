"""The pages' commands, typed as they stand in a fresh clone, in their order; runs are cut to a few updates."""

import pathlib
import re
import subprocess

import pytest

from tests.docs.markdown import DOCS, REPO, files, typed

PAGES = (
    "quickstart", "tutorial", "report", "papers", "custom_functions", "environments", "code_rewards",
    "recipes", "lora", "evaluation", "deployment", "kubernetes", "planning",
)  # fmt: skip
"""In the order in which they are tried: some read what others' commands made."""
NOT_HERE = {
    r"\.\.\.|\b(FOLDER|NAME)\b": "stands for something of the reader's",
    r"\.example\b": "a host of the reader's",
    r"runs/mine|gsm8k\.jsonl|runs/cgp|base\.json|Qwen3-1\.7B": "files of the reader's",
    r"setup\.sh (gpu|tpu)|CUDA_VISIBLE_DEVICES": "another machine",
    r"profile\.json": "a profile of the reader's machine",
    r"--serve\b|store_server|make_certificates": "a server, which has tests of its own",
    r"tests\.bench": "minutes to hours",
    r"compile_tpu": "an environment of its own, which has tests of its own",
}
"""What is not tried, by what is in the command, and why."""
LOCAL = re.compile(r"-m launch\.local --config=|launch/quickstart\.sh")


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("fresh") / "sluice"
    subprocess.run(["git", "clone", "--quiet", str(REPO), str(folder)], check=True)
    return folder


def tried(page: str) -> list[str]:
    """A page's commands that can be tried, each run cut to four updates."""
    found = [command for command in typed(DOCS / f"{page}.md") if not any(re.search(p, command) for p in NOT_HERE)]
    return [c + " --config.run.num_updates=4" if LOCAL.search(c) and "num_updates" not in c else c for c in found]


def test_nearly_all_that_can_be_typed_is_tried():
    assert sum(len(tried(page)) for page in PAGES) > 30


@pytest.mark.nightly
@pytest.mark.integration
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page", PAGES)
def test_page_does_what_it_says(clone: pathlib.Path, page: str):
    for name, text in files(DOCS / f"{page}.md").items():
        (clone / name).write_text(text)
    for command in ["bash launch/setup.sh", *tried(page)]:
        done = subprocess.run(["bash", "-c", command], cwd=clone, capture_output=True, text=True, timeout=1800)
        said = (done.stdout + done.stderr)[-3000:]
        assert done.returncode == 0, f"{command}\n{said}"
