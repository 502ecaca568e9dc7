from __future__ import annotations

import json

import pytest
import torch
import transformers as tf

from rlhf_app.models.scalar_head import load_scalar_model, read_reward_facts

pytestmark = pytest.mark.slow

# Politeness: learnable from the answer alone.
WORDS = ["sun", "moon", "tree", "river", "stone", "cloud", "bird", "road", "house", "field"]
PAIRS = [
    {"prompt": f"say {w}:", "chosen": f" the {w}, please", "rejected": f" {w} {w}! {i}"}
    for i, w in enumerate(WORDS)
]
TRAIN, HELD_OUT = PAIRS[:7], PAIRS[7:]
CPU = torch.device("cpu")


@pytest.fixture
def eval_file(tmp_path):
    path = tmp_path / "eval.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in HELD_OUT))
    return {"eval": [{"path": str(path)}]}


def settings(**changes):
    return {
        "learning_rate": 5e-3, "batch_size": 4, "micro_batch_size": 2, "epochs": 10,
        "lr_schedule": "constant", **changes,
    }  # fmt: skip


def held_out_scores(path):
    """Scores at each answer's EOS, one row at a time, from the saved directory."""
    tokenizer = tf.AutoTokenizer.from_pretrained(path)
    model = load_scalar_model(str(path), dtype=torch.float32, device=CPU).eval()
    scores = {}
    for side in ("chosen", "rejected"):
        scores[side] = []
        for pair in HELD_OUT:
            ids = [*tokenizer(pair["prompt"] + pair[side]).input_ids, tokenizer.eos_token_id]
            with torch.no_grad():
                scores[side].append(model(torch.tensor([ids]))[0, -1].item())
    return torch.tensor(scores["chosen"]).double(), torch.tensor(scores["rejected"]).double()


@pytest.mark.parametrize("loss", ["final_token", "token_wise"])
def test_complaint_dsc14_the_artifact_gives_the_reported_numbers(
    tiny_lm, run_stage, eval_file, loss
):
    run = run_stage(
        "reward", TRAIN, tiny_lm, data=eval_file, loss=loss, center_coef=0.01, **settings()
    )
    chosen, rejected = held_out_scores(run["model"])
    result, facts = run["result"], read_reward_facts(str(run["model"]))
    assert result["eval_accuracy"] == 1.0
    assert result["eval_accuracy"] == (chosen > rejected).double().mean().item()
    assert result["eval_margin"] == pytest.approx((chosen - rejected).mean().item(), rel=1e-4)
    both = torch.cat([chosen, rejected])
    assert facts.stats.mean == pytest.approx(both.mean().item(), rel=1e-4, abs=1e-5)
    assert facts.stats.std == pytest.approx(both.std(unbiased=False).item(), rel=1e-4)
    assert (result["score_mean"], result["score_std"]) == (facts.stats.mean, facts.stats.std)
    assert facts.stats.std_floor == 0.01
    assert facts.eos_token_ids == (0,)
    assert facts.chat_format == "plain"
    loaded = tf.AutoModelForSequenceClassification.from_pretrained(run["model"])
    assert loaded.config.num_labels == 1


def test_metrics(tiny_lm, run_stage, eval_file):
    run = run_stage("reward", TRAIN, tiny_lm, data=eval_file, **settings(epochs=2, eval_every=1))
    train = [r for r in run["metrics"] if r["kind"] == "train"]
    assert [r["step"] for r in train] == [1, 2, 3, 4]  # 7 pairs in fours, twice
    assert [r["step"] for r in run["metrics"] if r["kind"] == "eval"] == [0, 1, 2, 3, 4]
    for record in train:
        assert 0 <= record["accuracy"] <= 1
        assert record["margin"] == pytest.approx(record["chosen"] - record["rejected"], abs=1e-9)
        assert record["grad_norm"] > 0
        assert record["tokens_per_second"] > 0


@pytest.mark.parametrize(
    ("ranks", "zero_stage", "micro"), [(1, 0, 8), (2, 0, 1), (1, 2, 2), (2, 2, 3), (2, 3, 2)]
)
def test_every_layout_trains_the_same_model(
    tiny_lm, run_stage, eval_file, ranks, zero_stage, micro
):
    one = run_stage("reward", TRAIN, tiny_lm, data=eval_file, **settings(epochs=2))
    many = run_stage(
        "reward", TRAIN, tiny_lm, ranks=ranks, torchrun=(ranks, zero_stage) == (2, 3),
        data=eval_file, **settings(epochs=2, zero_stage=zero_stage, micro_batch_size=micro),
    )  # fmt: skip
    for a, b in zip(one["metrics"], many["metrics"], strict=True):
        names = ["loss", "accuracy", "margin"]
        if a["kind"] == "eval":
            names += ["calibration", "accuracy_chosen_longer", "longer_wins", "shorter_wins"]
            names += ["score_length_correlation"]
            # Every chosen answer here is the longer one.
            assert (b["accuracy_chosen_shorter"], b["longer_wins"]) == (None, 1.0)
        for name in names:
            assert b[name] == pytest.approx(a[name], rel=1e-3, abs=1e-4)
    chosen, rejected = held_out_scores(many["model"])
    expected_chosen, expected_rejected = held_out_scores(one["model"])
    torch.testing.assert_close(chosen, expected_chosen, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(rejected, expected_rejected, rtol=1e-3, atol=1e-3)


def test_margins_are_read_from_the_data(tiny_lm, run_stage, eval_file):
    with_margin = [row | {"margin": 3.0} for row in TRAIN]
    runs = [
        run_stage("reward", rows, tiny_lm, data=eval_file, **settings(epochs=1, use_margin=use))
        for rows, use in ((TRAIN, True), (with_margin, True), (with_margin, False))
    ]
    plain, demanding, ignored = (run["metrics"][1]["loss"] for run in runs)
    assert demanding > plain + 1.0
    assert ignored == plain


@pytest.mark.parametrize("ranks", [1, 2])
def test_complaint_dsc6_a_model_that_became_nan_is_not_saved(
    tiny_lm, run_stage, eval_file, tmp_path, ranks
):
    broken = settings(learning_rate=1e30, epochs=1, max_steps=1)
    with pytest.raises(AssertionError, match="NonFiniteError"):
        run_stage("reward", TRAIN, tiny_lm, ranks=ranks, data=eval_file, **broken)
    assert list(tmp_path.glob("*/reward/metrics.jsonl"))
    assert not list(tmp_path.glob("*/reward/result.json"))
    assert not list(tmp_path.glob("*/reward/model"))
