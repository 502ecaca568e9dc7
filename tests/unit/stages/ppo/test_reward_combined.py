"""The weighted sum by hand, the order of its rules, its metrics, and errors of single sources."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from data_sources.examples import PromptExample
from data_sources.records import Message, Record
from rlhf_app.config.schema import PPOConfig
from rlhf_app.errors import ConfigError
from rlhf_app.models.scalar_head import ScoreStats
from rlhf_app.training.distributed import Dist
from stages.ppo.experience import AnswerTable, lay_out
from stages.ppo.reward import RewardScorer
from stages.ppo.reward_sources.build import combine, load_text_sources
from stages.ppo.reward_sources.combined import CombinedScorer, score_answers
from stages.ppo.reward_sources.function import FunctionReward

ALONE = Dist(0, 0, 1, torch.device("cpu"))


class Ids:
    """Answers as text: their ids."""

    kind = "plain"

    def decode(self, ids):
        return " ".join(map(str, ids))


class LastId:
    """A reward model whose raw score is the last token."""

    config = SimpleNamespace()

    def __call__(self, input_ids, position_ids):
        return input_ids.float()


PROMPTS = [PromptExample(str(i), [1], f"p{i}", Record((Message("user", ""),))) for i in range(3)]
RESPONSES = [[4], [5, 20], [6, 7, 9]]
STOPPED = [True, False, True]


def scorer(rewards, texts=None, dist=ALONE, **settings):
    ppo = PPOConfig(rewards=rewards, **settings)
    model = RewardScorer(LastId(), ScoreStats(mean=2.0, std=4.0), ppo, Ids())
    uses_model = any(source.model for source in ppo.rewards)
    return combine(ppo, model if uses_model else None, texts or {}, Ids(), dist)


def score(of, stopped=STOPPED):
    return of(lay_out([p.input_ids for p in PROMPTS], RESPONSES), PROMPTS, RESPONSES, stopped)


def lengths(answers):
    return [float(len(text)) for text in answers.responses]  # 1, 4, 5


def test_the_sum_by_hand():
    """Model: (4, 20, 9 - 2) / 4 = .5, 4.5, 1.75, clipped at 2.

    Lengths 1, 4, 5: (x - 1) / 2 = 0, 1.5, 2, clipped at 1.5.
    3 x (.5, 2, 1.75) - 2 x (0, 1.5, 1.5) = 1.5, 3, 2.25; the second was cut: 3 - 1.
    """
    rewards = [
        {"function": "m:size", "weight": -2, "mean": 1, "std": 2, "clip": 1.5},
        {"model": True, "weight": 3, "clip": 2},
    ]
    found = scorer(rewards, {"size": lengths})
    assert score(found).tolist() == [1.5, 2.0, 2.25]
    # Means of each before its weight, since the last call.
    assert found.take_means() == pytest.approx({"reward_size": 1.0, "reward_model": 4.25 / 3})
    score(found)
    assert found.take_means() == pytest.approx({"reward_size": 1.0, "reward_model": 4.25 / 3})


def test_text_sources_are_asked_once_for_all_answers_of_a_rank():
    calls = []

    def keeps(answers):
        calls.append(answers.responses)
        return lengths(answers)

    found = scorer(["model", "m:size"], {"size": keeps})
    table = AnswerTable([p.input_ids for p in PROMPTS], RESPONSES)
    batches = [(rows, table.layout(rows)) for rows in ([2, 0], [1])]
    scores = score_answers(found, batches, PROMPTS, RESPONSES, STOPPED)
    assert calls == [["4", "5 20", "6 7 9"]]
    # .5 + 1, 4.5 + 4 - 1, 1.75 + 5
    assert scores.tolist() == [1.5, 7.5, 6.75]
    # The model alone, and any other scorer, batch after batch.
    alone = score_answers(scorer("model"), batches, PROMPTS, RESPONSES, STOPPED)
    assert alone.tolist() == [0.5, 3.5, 1.75]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"missing_eos": "replace", "missing_eos_penalty": 7.0}, [1.0, -7.0, 5.0]),
        ({"missing_eos": "ignore"}, [1.0, 4.0, 5.0]),
        ({"stop_at_eos": False}, [1.0, 4.0, 5.0]),
        ({"reward_clip": 0.1}, [1.0, 3.0, 5.0]),  # of the model alone; 1 off for the cut answer
    ],
)
def test_the_rule_for_cut_answers_comes_last(settings, expected):
    found = scorer("m:size", {"size": lengths}, **settings)
    assert score(found).tolist() == expected
    assert found.take_means() == {}  # the reward tells it


def test_complaint_dsc14_stored_normalisation_is_applied_unless_it_is_replaced():
    with_other = [{"model": True}, {"function": "m:size", "weight": 1e-30}]
    texts = {"size": lengths}
    alone = score(scorer("model"))
    assert alone.tolist() == [0.5, 3.5, 1.75]  # 4.5 - 1
    assert torch.equal(score(scorer(with_other, texts)), alone)
    assert score(scorer([{"model": True, "mean": 0, "std": 10}])).tolist() == pytest.approx(
        [0.4, 1.0, 0.9]
    )
    # A flat reward model is not blown up to noise.
    flat = RewardScorer(LastId(), ScoreStats(mean=4.0, std=0.0), PPOConfig(), Ids())
    both = combine(PPOConfig(rewards=["model", "m:size"]), flat, texts, Ids(), ALONE)
    assert both.sources[0].std == 0.01


def test_the_default_is_the_reward_model_as_it_is():
    assert isinstance(scorer("model"), RewardScorer)
    assert isinstance(scorer("model=0.5"), CombinedScorer)
    assert scorer("model").take_means() == {}


def test_functions_get_texts_and_are_found_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my.py").write_text(
        "def size(prompts, responses):\n"
        "    return [10 * int(p[1:]) + len(r) for p, r in zip(prompts, responses)]\n"
    )
    config = SimpleNamespace(ppo=PPOConfig(rewards=["my.py:size", "my.py:size=2"]))
    texts = load_text_sources(config, ALONE, Ids())
    assert list(texts) == ["size", "size_2"]
    found = combine(config.ppo, None, texts, Ids(), ALONE)
    assert score(found, [True] * 3).tolist() == [3.0, 3.0 * 14, 3.0 * 25]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return [1.0]", "scorer bad.py:f: returned 1 scores for 3 answers; return one for each"),
        ("return [float('nan')] * 3", "scorer bad.py:f: row 0 scored nan, not a finite number"),
        ("return ['x'] * 3", "scorer bad.py:f: row 0 scored 'x', not a number"),
        ("return None", "scorer bad.py:f: returned a NoneType; return a list of numbers"),
        ("raise KeyError('k')", "scorer bad.py:f: raised KeyError: 'k'"),
        ("raise SystemExit(3)", "scorer bad.py:f: raised SystemExit: 3"),
        ("return {r: 1.0 for r in responses}", "scorer bad.py:f: returned a dict; return a list"),
        ("return [0.0, 1e300, 0.0]", "ppo.rewards source f: row 1 scored 1e+300, whose weight x"),
    ],
)
def test_bad_functions_are_one_line(tmp_path, monkeypatch, body, message):
    monkeypatch.chdir(tmp_path)
    Path("bad.py").write_text(f"def f(prompts, responses):\n    {body}\n")
    found = scorer("bad.py:f", {"f": FunctionReward("bad.py:f")})
    with pytest.raises(ConfigError) as caught:
        score(found)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_scores_beyond_fp32_after_their_weight_are_named_but_not_those_that_are_clipped():
    def large(answers):
        return [1.0, 1e38, 1.0]

    for source in ({"weight": 10}, {"std": 0.1}):
        found = scorer([{"function": "m:f", **source}], {"f": large})
        with pytest.raises(ConfigError, match=r"source f: row 1 scored 1e\+38"):
            score(found)
    clipped = scorer([{"function": "m:f", "std": 1.0, "clip": 5, "weight": 10}], {"f": large})
    assert score(clipped, [True] * 3).tolist() == [10.0, 50.0, 10.0]


def test_a_source_that_changes_its_lists_does_not_reach_the_next():
    def spoils(answers):
        answers.responses[:] = ["x"] * 100
        return [0.0] * 3

    found = scorer(["m:bad", "m:size"], {"bad": spoils, "size": lengths})
    assert score(found, [True] * 3).tolist() == [1.0, 4.0, 5.0]


@pytest.mark.parametrize("counted", [0, 2])
def test_rows_that_only_keep_a_rank_in_step_are_not_counted(counted):
    """Of lengths 1, 4, 5 and raw 4, 20, 7 the first two: 5 / 2, (.5 + 4.5) / 2."""
    seen = []

    def keeps(answers):
        seen.extend(answers.responses)
        return lengths(answers)

    found = scorer([{"model": True, "clip": 9}, "m:size"], {"size": keeps})
    batches = [(range(3), lay_out([p.input_ids for p in PROMPTS], RESPONSES))]
    scores = score_answers(found, batches, PROMPTS, RESPONSES, [True] * 3, counted=counted)
    assert scores[:counted].tolist() == [1.5, 8.5][:counted]
    assert seen == ["4", "5 20"][:counted]
    means = {"reward_model": 2.5, "reward_size": 2.5} if counted else dict.fromkeys(
        ("reward_model", "reward_size"), 0.0
    )  # fmt: skip
    assert found.take_means() == means


@pytest.mark.slow
def test_an_error_on_one_rank_ends_both_and_means_are_global(tmp_path, run_ranks):
    """Rank 0 would otherwise wait for rank 1 in its next collective."""
    script = tmp_path / "ranks.py"
    script.write_text(
        "import sys\n"
        "from rlhf_app.commands.worker import leave\n"
        "from rlhf_app.errors import ConfigError\n"
        "from rlhf_app.training.distributed import setup\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import test_reward_combined as test\n"
        "dist = setup()\n"
        "error = None\n"
        "def source(answers):\n"
        "    if error is not None and dist.rank == 1:\n"
        "        raise error\n"
        "    return [10.0 * dist.rank + length for length in test.lengths(answers)]\n"
        "found = test.scorer(['model', 'm:size'], {'size': source}, dist=dist)\n"
        "test.score(found)\n"
        # Lengths 1, 4, 5 on one rank, 11, 14, 15 on the other.
        "means = found.take_means()\n"
        "assert abs(means['reward_size'] - 50 / 6) < 1e-9, means\n"
        "for error in (ConfigError('scorer m:size: no'), ZeroDivisionError('oh')):\n"
        "    try:\n"
        "        test.score(found)\n"
        "    except Exception as caught:\n"
        "        kind = type(error) if dist.rank == 1 else (ConfigError, RuntimeError)\n"
        "        assert isinstance(caught, kind), caught\n"
        "        assert str(error) in str(caught)\n"
        "        assert dist.rank == 1 or str(caught).startswith('on rank 1: '), caught\n"
        "    else:\n"
        "        raise AssertionError('no error')\n"
        f"open({str(tmp_path)!r} + f'/done{{dist.rank}}', 'w').close()\n"
        "leave(0)\n"
    )
    done = run_ranks(script, ranks=2, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "done0").exists()
    assert (tmp_path / "done1").exists()
