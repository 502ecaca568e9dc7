"""A real model learns what a real scorer likes, through pairs and a reward model only.

stories260K answers its own openings; VADER's sentiment of the answers makes the pairs; the reward
model learns from the pairs and PPO from the reward model. Gold could rise by accident, so the
same pipeline with flipped labels must drive it down, and with random labels leave it.

`-m campaign` runs the whole table of `sentiment_runs.py` (hours on one core; that file as a script
runs it side by side); CI runs a smaller experiment on one seed.
"""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("vaderSentiment")


def _load() -> ModuleType:
    path = Path(__file__).with_name("sentiment_runs.py")
    specification = importlib.util.spec_from_file_location("sentiment_runs", path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules["sentiment_runs"] = module  # dataclasses look their module up
    specification.loader.exec_module(module)
    return module


runs = _load()


@pytest.fixture
def runner_of(shared_dir: Path, tmp_path: Path) -> Callable[..., Any]:
    """Runner of a given size, on the shared model."""
    model = str(shared_dir / "models" / "stories260K")
    return lambda *size: runs.Runner(tmp_path, model, runs.Size(*size))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_gold_follows_the_labels_both_ways(runner_of):
    runner = runner_of(384, 128, 14)
    liked = runner.run(runs.Case("liked"), 1)
    disliked = runner.run(runs.Case("disliked", "negative"), 1)
    assert liked.gold_before == pytest.approx(0.43, abs=0.12)
    assert liked.reward_accuracy >= 0.8
    assert disliked.reward_accuracy >= 0.8
    assert liked.gold >= liked.gold_before + 0.25
    assert disliked.gold <= disliked.gold_before - 0.4
    for outcome in (liked, disliked):
        assert outcome.kl_per_answer <= 12
        assert outcome.distinct_3 >= 0.2


@pytest.mark.campaign
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("case", runs.CASES, ids=[case.name for case in runs.CASES])
def test_every_claim_of_the_table_holds(runner_of, case):
    runner = runner_of(1024, 256, 40)
    print(f"\n{runs.HEADER}")
    outcomes = []
    for seed in case.seeds:
        outcomes.append(runner.run(case, seed))
        print(runs.line(case, seed, outcomes[-1]))
    print(runs.summary_line(case, outcomes))
    assert runs.broken(case, outcomes) == []


def test_random_labels_are_fixed_noise():
    path = Path(__file__).parents[1] / "data" / "vader.py"
    specification = importlib.util.spec_from_file_location("vader_scorers", path)
    vader = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(vader)
    texts = [f"a tale of {n} happy cats" for n in range(2000)]
    scores = vader.random([""] * len(texts), texts)
    assert vader.random([""], [texts[7]]) == [scores[7]]
    assert min(scores) >= -1
    assert max(scores) < 1
    # Uniform in [-1, 1): mean 0 and variance 1/3, within four standard errors.
    assert abs(sum(scores) / 2000) < 4 * (1 / 3 / 2000) ** 0.5
    assert abs(sum(s * s for s in scores) / 2000 - 1 / 3) < 4 * (4 / 45 / 2000) ** 0.5
