"""The command: names of what there is, and what it refuses."""

import pathlib

from launch.tools import model_wheels
from launch.tools.model_sources import licence_of
from tests.launch.commands import Done, call_each


def get(*lines: list[str], cwd: pathlib.Path) -> list[Done]:
    return call_each("launch.tools.get_model", lines, max_arguments=1, cwd=cwd)


def test_folder_of_this_machine_is_named_as_what_a_run_takes(tmp_path):
    (tmp_path / "theirs").mkdir()
    (done,) = get(["theirs", "--out=mine"], cwd=tmp_path)
    (line,) = done.err.splitlines()
    assert done.code == 2 and "--config.model.path=theirs" in line and not (tmp_path / "mine").exists()


BAD = {
    (): "give a model, as in python -m launch.tools.get_model smollm2",
    ("",): "give a model",
    ("nosuch",): "no model 'nosuch': give smollm2, or a name of the Hub",
    ("smollm2", "more"): "unexpected argument 'more'",
    ("smollm2", "--revision=main"): "--revision has no effect on smollm2",
    ("smollm2", "--outt=x"): "Unknown command line flag 'outt'",
}


def test_bad_input_is_one_line_and_exit_code_2(tmp_path):
    for done, said in zip(get(*map(list, BAD), cwd=tmp_path), BAD.values(), strict=True):
        (line,) = done.err.splitlines()
        assert done.code == 2 and line.startswith("error: ") and said in line
    assert not any(tmp_path.iterdir())


def test_known_models_name_their_licence_and_hash():
    for model in model_wheels.MODELS.values():
        assert model.licence and len(model.wheel.sha256) == 64


def test_licence_is_what_the_folders_own_files_say(tmp_path):
    assert "no licence is named" in licence_of(tmp_path)
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n# A model\n")
    assert licence_of(tmp_path) == "licence mit by its card"
