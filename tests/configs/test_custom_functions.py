"""What is said of a user's own function that can't be used; `mine.py` lies where the command is started."""

import os
import pathlib
import subprocess
import sys

import pytest

from configs import custom_functions
from configs.sections import LossConfig, PromptsConfig
from configs.sections.loss_table import CUSTOM_LOSS

REPO = pathlib.Path(custom_functions.__file__).resolve().parent.parent
PAIR = custom_functions.Signature(takes=("rewards", "config"), returns="advantages")


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """Writes the module `mine` into a fresh working directory, which is not on the path yet."""
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    monkeypatch.chdir(tmp_path)

    def write(text: str) -> None:
        (tmp_path / "mine.py").write_text(text)

    yield write
    sys.modules.pop("mine", None)


def refusal(name="mine:f", wanted=PAIR):
    with pytest.raises(ValueError) as e:
        custom_functions.load("loss.advantage", name, wanted)
    assert str(e.value).startswith(f"loss.advantage={name}") and "\n" not in str(e.value)
    return str(e.value)


def test_load_finds_the_module_where_the_command_was_started(mine):
    mine("import other\nf = other.f\n")
    pathlib.Path("other.py").write_text("def f(rewards, config):\n    return 'mine'\n")
    assert custom_functions.load("loss.advantage", "mine:f", PAIR)(1, 2) == "mine"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import no_such_package\n", "cannot import module mine: ModuleNotFoundError: No module named 'no_such"),
        ("def f(:\n", "cannot import module mine: SyntaxError: "),
        ("raise RuntimeError('two\\nlines')\n", "cannot import module mine: RuntimeError: two"),
        ("import sys\nsys.exit('usage: mine')\n", "cannot import module mine: SystemExit: usage: mine"),
        ("def rloo_(r, c): ...\n", "mine.py has no 'f'"),
        ("def ff(r, c): ...\n", "has no 'f'; did you mean 'ff'?"),
        ("f = 3\n", "expected a function (rewards, config) -> advantages, got int"),
        (
            "async def f(r, c): ...\n",
            "expected a plain function (rewards, config) -> advantages, got an async function",
        ),
        ("def f(r): ...\n", "expected a function (rewards, config) -> advantages, got (r): too many positional"),
        ("def f(r, c, eps): ...\n", "got (r, c, eps): missing a required argument: 'eps'"),
        ("def f(r, *, config): ...\n", "got (r, *, config): too many positional arguments"),
        ("f = dict.fromkeys\nf = type('C', (), {'__call__': lambda self, a: a})()\n", "got (a): too many positional"),
    ],
)
def test_load_what_can_not_be_used_is_refused_in_one_line(mine, text, said):
    mine(text)
    assert said in refusal()


def test_load_looks_where_the_command_was_started_before_the_installed_packages_but_behind_ours(mine, monkeypatch):
    elsewhere, here = pathlib.Path("elsewhere").resolve(), os.getcwd()
    elsewhere.mkdir()
    (elsewhere / "mine.py").write_text("def f(rewards, config):\n    return 'elsewhere'\n")
    mine("def f(rewards, config):\n    return 'mine'\n")
    monkeypatch.setattr(sys, "path", [str(REPO), str(elsewhere), *sys.path])
    assert custom_functions.load("loss.advantage", "mine:f", PAIR)(1, 2) == "mine"
    assert sys.path[:3] == [str(REPO), here, str(elsewhere)]


def test_load_missing_module_says_where_it_looked(mine):
    said = refusal("nowhere.to.be:f")
    assert "No module named 'nowhere'" in said and f"looked in {os.getcwd()}, on PYTHONPATH" in said
    mine("import no_such_package\n")
    assert "looked in" not in refusal()  # mine itself was found
    mine("import min\n")
    assert "No module named 'min'" in (said := refusal()) and "looked in" not in said  # nor is min a package of mine


@pytest.mark.parametrize(
    "signature", ["(r, c)", "(*a)", "(r, c, eps=1.0)", "(r, c, *, eps=1.0)", "(r, c, /)", "(r, c, **kw)"]
)
def test_load_takes_whatever_can_be_called_so(mine, signature):
    mine(f"def f{signature}: ...\n")
    custom_functions.load("loss.advantage", "mine:f", PAIR)


def test_load_constant_by_position_only_is_no_constant(mine):
    mine("def f(logprobs, inputs, clip_low, /): ...\n")
    said = refusal(wanted=CUSTOM_LOSS)
    assert "any of clip_low, clip_high, dual_clip, min_weight, max_weight) -> (loss, clipped)" in said
    assert "missing a required" in said


@pytest.mark.parametrize("name", ["a:b", "a.b_2.c:d_1"])
def test_names_of_the_users_own_are_taken_unseen(name):
    assert LossConfig(name=name, advantage=name).name == name and PromptsConfig(verifier=name).verifier == name


@pytest.mark.parametrize(
    ("section", "fields", "said"),
    [
        (
            LossConfig,
            dict(name="grpo_clp"),
            r"loss.name: expected one of .*grpo_clip, .*'grpo_clp'; did you mean 'grpo_clip'",
        ),
        (LossConfig, dict(advantage="rlo"), r"loss.advantage: expected one of grpo, dr_grpo, rloo, .*mean 'rloo'"),
        (PromptsConfig, dict(verifier="maths"), r"prompts.verifier: expected one of reasoning_gym, .*mean 'math'"),
        (LossConfig, dict(name="zzz"), r"or module:function, got 'zzz'$"),
        (LossConfig, dict(name="a/b.py:f"), "got 'a/b.py:f'"),
        (LossConfig, dict(name="a:"), "got 'a:'"),
        (PromptsConfig, dict(verifier=":f"), "got ':f'"),
    ],
)
def test_names_that_are_neither_are_refused_with_the_nearest(section, fields, said):
    with pytest.raises(ValueError, match=said):
        section(**fields)


LOSS = "def f(logprobs, inputs, *, clip_high: float, max_weight: float = 4, dual_clip=None, beta=0.1): ...\n"


def test_loss_constants_of_ones_own_are_its_own_defaults_and_what_is_given(mine):
    mine(LOSS)
    assert LossConfig(name="mine:f", clip_high=0.5).constants == {"clip_high": 0.5, "max_weight": 4.0}
    config = LossConfig(name="mine:f", clip_high=0.5, max_weight=2, dual_clip=3)
    assert config.constants == {"clip_high": 0.5, "max_weight": 2.0, "dual_clip": 3.0}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (dict(), "loss.name=mine:f has no default for clip_high; set loss.clip_high"),
        (
            dict(clip_high=0.5, clip_low=0.1),
            "loss.clip_low=0.1 has no effect with loss.name=mine:f, which reads clip_high, max_weight, dual_clip",
        ),
    ],
)
def test_loss_constants_of_ones_own_that_do_not_fit_are_refused(mine, fields, said):
    mine(LOSS)
    with pytest.raises(ValueError, match=said):
        _ = LossConfig(name="mine:f", **fields).constants


def test_loss_of_ones_own_has_no_rules_of_a_method_but_the_general_ones(mine):
    mine(LOSS)
    LossConfig(name="mine:f", normalization="sequence", advantage="rloo", kl_coef=0.1, overlong_buffer_tokens=4)
    with pytest.raises(ValueError, match="proximal=round has no effect"):
        _ = LossConfig(name="mine:f", proximal="round").optional_inputs  # known once the function is there
    with pytest.raises(ValueError, match="max_weight must be > 0"):
        LossConfig(name="mine:f", max_weight=0.0)
    with pytest.raises(ValueError, match=r"clip_low must be in \[0, 1\]"):
        LossConfig(name="mine:f", clip_low=2.0)


def test_python_path_leads_a_child_to_our_packages_and_to_the_users(tmp_path, monkeypatch):
    for folder in ("here", "given"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"mine_{folder}.py").write_text("def f(): ...\n")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "given"))
    (tmp_path / "given" / "child.py").write_text(
        "from configs import custom_functions\n"
        "custom_functions.load('x', 'mine_given:f', custom_functions.Signature(takes=(), returns=''))\n"
        "custom_functions.load('x', 'mine_here:f', custom_functions.Signature(takes=(), returns=''))\n"
    )
    env = os.environ | {"PYTHONPATH": custom_functions.python_path()}
    subprocess.run([sys.executable, "-P", "-m", "child"], env=env, check=True)
    assert custom_functions.python_path().split(os.pathsep) == [str(REPO), str(tmp_path / "given")]
    monkeypatch.setenv("PYTHONPATH", custom_functions.python_path())
    assert custom_functions.python_path() == os.environ["PYTHONPATH"]
