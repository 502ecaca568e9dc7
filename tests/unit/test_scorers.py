"""Scorers named by module or file, and one-line errors for all that can be wrong with them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_app.errors import ConfigError
from rlhf_app.scorers import load_scorer

SOURCE = """
import math
import os
import sys
from dataclasses import dataclass

constant = 3

@dataclass
class Lengths:
    def of(self, prompts, responses):
        return [len(r) for r in responses]

lengths = Lengths()

def both(prompts, responses):
    return [len(p) + 100 * len(r) for p, r in zip(prompts, responses)]

def lazy(prompts, responses):
    return (len(r) for r in responses)

def short(prompts, responses):
    return [0.5] * (len(responses) - 1)

def nan(prompts, responses):
    return [math.nan if r == "bad" else 1.0 for r in responses]

def infinite(prompts, responses):
    return [math.inf for r in responses]

def words(prompts, responses):
    return ["much" for r in responses]

def one(prompts, responses):
    return 1.0

def nothing(prompts, responses):
    return None

def table(prompts, responses):
    return {r: 1.0 for r in responses}

def text(prompts, responses):
    return "12"

def octets(prompts, responses):
    return b"12"

def unordered(prompts, responses):
    return {1.0, 2.0}

def huge(prompts, responses):
    return [10**400 for r in responses]

def bug(prompts, responses):
    return (1.0 + None for r in responses)

def leaves(prompts, responses):
    sys.exit("bye")

def empties(prompts, responses):
    count = len(responses)
    prompts.clear()
    responses.clear()
    return [0.5] * count

def moves(prompts, responses):
    os.chdir("/")
    return [0.5] * len(responses)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current directory with `sample_scores.py`, forgotten afterwards."""
    (tmp_path / "sample_scores.py").write_text(SOURCE)
    (tmp_path / "broken_scores.py").write_text("raise RuntimeError('two\\nlines')\n")
    (tmp_path / "needy_scores.py").write_text("import no_such_package\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("sample_scores", "broken_scores", "needy_scores"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


@pytest.mark.parametrize("source", ["sample_scores", "sample_scores.py", "./sample_scores.py"])
def test_module_and_file_in_the_current_directory(here: Path, source: str) -> None:
    scorer = load_scorer(f"{source}:both")
    assert scorer(["ab", ""], ["xyz", "x"]) == [302.0, 100.0]


def test_file_elsewhere_by_absolute_path(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    assert load_scorer(f"{here}/sample_scores.py:both")(["a"], ["b"]) == [101.0]


def test_attribute_of_an_object_and_iterators(here: Path) -> None:
    assert load_scorer("sample_scores:lengths.of")(["p"], ["four"]) == [4.0]
    assert load_scorer("sample_scores.py:lazy")(["p"] * 2, ["", "ab"]) == [0.0, 2.0]


def test_scores_are_plain_floats(here: Path) -> None:
    assert all(type(s) is float for s in load_scorer("sample_scores:both")(["a"], ["b"]))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("sample_scores", "expected module:function"),
        (":both", "expected module:function"),
        ("sample_scores:", "expected module:function"),
        ("no_such_module:f", "no module no_such_module"),
        ("sample_scores.inner:f", "importing sample_scores.inner failed|no module sample_scores"),
        ("missing.py:f", "no file missing.py"),
        ("sample_scores:bot", "sample_scores has no bot"),
        ("sample_scores.py:lengths.to", "sample_scores.py has no lengths.to"),
        ("sample_scores:constant", "constant is of type int, not a function"),
        ("broken_scores:f", "failed with RuntimeError: two$"),
        ("broken_scores.py:f", "failed with RuntimeError: two$"),
        ("needy_scores:f", "needy_scores needs the package no_such_package"),
    ],
)
def test_specs_that_cannot_be_loaded(here: Path, spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_scorer(spec)
    text = str(caught.value)
    assert text.startswith(f"scorer {spec}: ")
    assert "\n" not in text


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("short", "returned 1 scores for 2 answers"),
        ("nan", "row 1 scored nan, not a finite number .answer 'bad'"),
        ("infinite", "row 0 scored inf"),
        ("words", "row 0 scored 'much', not a number"),
        ("one", "returned a float; return a list"),
        ("nothing", "returned a NoneType; return a list"),
        ("table", "returned a dict; return a list of numbers"),
        ("text", "returned a str; return a list of numbers"),
        ("octets", "returned a bytes; return a list of numbers"),
        ("unordered", "returned a set; return a list of numbers"),
        ("huge", "row 0 scored 1000.*, not a number"),
        ("bug", r"raised TypeError: unsupported operand .*sample_scores\.py, line \d+\)$"),
        ("leaves", r"raised SystemExit: bye \(.*sample_scores\.py, line \d+\)$"),
    ],
)
def test_scores_that_cannot_be_used(here: Path, function: str, message: str) -> None:
    scorer = load_scorer(f"sample_scores:{function}")
    with pytest.raises(ConfigError, match=message) as caught:
        scorer(["p", "p"], ["good", "bad"])
    assert str(caught.value).startswith(f"scorer sample_scores:{function}: ")
    assert "\n" not in str(caught.value)


def test_what_a_function_does_to_its_lists_stays_there(here: Path) -> None:
    prompts, responses = ["p", "q"], ["a", "b"]
    assert load_scorer("sample_scores:empties")(prompts, responses) == [0.5, 0.5]
    assert (prompts, responses) == (["p", "q"], ["a", "b"])


def test_the_current_directory_stays_that_of_the_run(here: Path) -> None:
    """Our own relative paths start there."""
    (here / "sub").mkdir()
    for name in ("moving.py", "moving_module.py"):
        (here / name).write_text("import os\nos.chdir('sub')\ndef f(p, r): return [1.0]\n")
    for spec in ("moving.py:f", "moving_module:f", "sample_scores.py:moves"):
        assert load_scorer(spec)(["p"], ["r"])
        assert Path.cwd() == here


@pytest.mark.parametrize("when", ["at once", "in the call"])
def test_a_file_imports_its_neighbours(here: Path, when: str) -> None:
    """As it does for `python -m`, wherever the program is started."""
    line = f"from neighbour_{when[:2]} import one"
    (here / "sub").mkdir()
    (here / f"sub/neighbour_{when[:2]}.py").write_text("one = 1.0\n")
    inside, above = ("", line) if when == "at once" else (line, "")
    (here / "sub/mine.py").write_text(f"{above}\ndef f(p, r):\n    {inside}\n    return [one]\n")
    assert load_scorer("sub/mine.py:f")(["p"], ["r"]) == [1.0]


def test_a_file_that_ends_the_program_is_an_error(here: Path) -> None:
    (here / "script.py").write_text("import sys\nsys.exit(3)\n")
    with pytest.raises(ConfigError, match=r"importing script\.py failed with SystemExit: 3"):
        load_scorer("script.py:f")


def test_long_answers_are_shortened_in_errors(here: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_scorer("sample_scores:infinite")(["p"], ["line\n" * 1000])
    assert len(str(caught.value)) < 200
    assert "\n" not in str(caught.value)


def test_installed_packages_win_over_the_current_directory(here: Path) -> None:
    (here / "colorsys.py").write_text("def rgb_to_hls(*a): return [0.0]\n")
    sys.modules.pop("colorsys", None)
    load_scorer("colorsys:rgb_to_hls")
    assert Path(str(sys.modules["colorsys"].__file__)).parent != here


def test_embedded_gold_loads_without_torch(repo_root: Path) -> None:
    code = (
        "import sys; from rlhf_app.scorers import load_scorer\n"
        "print(load_scorer('data_sources.embedded:gold')(['the lamp'], ['']))\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=repo_root, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "[0.0]\n")
