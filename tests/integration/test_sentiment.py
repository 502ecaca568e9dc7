"""A real model learns what a real scorer likes, through pairs and a reward model only.

stories260K answers its own openings; VADER's sentiment of the answers makes the pairs; the reward
model learns from the pairs and PPO from the reward model. Gold could rise by accident, so the
same pipeline with flipped labels must drive it down.

`-m campaign` runs the whole experiment on three seeds; CI runs a smaller one on one seed.
"""

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

SETTINGS = """
data: {chat_format: plain, split: shared}
reward: {learning_rate: 1.0e-3, epochs: 2, batch_size: 64, micro_batch_size: 64}
ppo:
  actor: {learning_rate: 3.0e-4}
  critic: {learning_rate: 1.0e-3}
  rollout_batch_size: 128
  ppo_epochs: 2
  mini_batches: 4
  micro_batch_size: 32
  kl_coef: 0.05
  reward_clip: 5
  stop_at_eos: false
  max_prompt_length: 17  # BOS and 16 sampled tokens
  max_response_length: 40
"""


@dataclass(frozen=True)
class Outcome:
    """What one run reports."""

    reward_accuracy: float
    gold_before: float
    gold: float
    kl_per_answer: float
    distinct_3: float
    training_seconds: float


Experiment = Callable[..., Outcome]


@pytest.fixture
def experiment(run_cli, shared_dir: Path, repo_root: Path, tmp_path: Path) -> Experiment:
    """Makes pairs with one scorer, trains RM and PPO, and tracks VADER as gold."""
    pytest.importorskip("vaderSentiment")
    shutil.copy(repo_root / "tests" / "data" / "vader.py", tmp_path)
    (tmp_path / "sentiment.yaml").write_text(SETTINGS)
    model = str(shared_dir / "models" / "stories260K")

    def run(scorer: str, seed: int, *, openings: int, held_out: int, updates: int) -> Outcome:
        out = f"{scorer}-{seed}"
        pairs = run_cli(
            "data", "make-pairs", "--model", model, "--scorer", f"vader:{scorer}",
            "--self-prompts", str(openings), "--prompt-tokens", "16", "--num-answers", "6",
            "--max-new-tokens", "40", "--no-eos", "--min-gap", "0.25", "--seed", str(seed),
            "--eval-prompts", str(held_out), "--out", f"{out}.jsonl",
            "--eval-out", f"{out}-eval.jsonl", timeout=600,
        )  # fmt: skip
        assert pairs.returncode == 0, pairs.stdout + pairs.stderr
        began = time.monotonic()
        done = run_cli(
            "train", "--actor-model", model, "--data", f"{out}.jsonl",
            "--eval-data", f"{out}-eval.jsonl", "--data-split", "shared", "--step", "2", "3",
            "--config", "sentiment.yaml", "--set", f"ppo.updates={updates}",
            "--gold", "vader:positive", "--seed", str(seed), "--output-dir", out,
            "--deployment-type", "cpu", timeout=1200,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        summary = json.loads((tmp_path / out / "summary.json").read_text())
        ppo = summary["ppo"]
        return Outcome(
            reward_accuracy=summary["reward"]["eval_accuracy"],
            gold_before=ppo["gold"]["sft"],
            gold=ppo["gold"]["ppo"],
            kl_per_answer=ppo["kl_per_answer"],
            distinct_3=ppo["distinct_3"],
            training_seconds=time.monotonic() - began,
        )

    return run


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_gold_follows_the_labels_both_ways(experiment: Experiment):
    size = {"openings": 384, "held_out": 128, "updates": 14}
    liked = experiment("positive", 1, **size)
    disliked = experiment("negative", 1, **size)
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
def test_three_seeds_reach_the_reference(experiment: Experiment):
    size = {"openings": 1024, "held_out": 256, "updates": 40}
    golds = []
    for seed in (1, 2, 3):
        liked = experiment("positive", seed, **size)
        disliked = experiment("negative", seed, **size)
        print(f"seed {seed}: {liked}\n  flipped: {disliked}")
        assert liked.reward_accuracy >= 0.88
        assert liked.gold >= 0.82
        assert liked.gold - disliked.gold >= 1.0
        assert liked.kl_per_answer <= 9
        assert liked.distinct_3 >= 0.24
        assert liked.training_seconds <= 360
        golds.append(liked.gold)
    assert sum(golds) / 3 >= 0.85
