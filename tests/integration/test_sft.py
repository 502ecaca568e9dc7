from __future__ import annotations

import math

import pytest
import torch
import transformers as tf

pytestmark = pytest.mark.slow

ANSWERS = ["red.", "deep blue.", "no", "it is 12.", "cats", "dogs!", "maybe so", "x"]
ROWS = [{"prompt": f"question {i}:", "response": f" {a}"} for i, a in enumerate(ANSWERS)]
# The same rows for evaluation would be a leak; these only fill the set.
EVAL = [{"prompt": "other:", "response": " thing"}, {"prompt": "more?", "response": " none."}]


@pytest.fixture
def eval_file(tmp_path):
    import json

    path = tmp_path / "eval.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in EVAL))
    return {"eval": [{"path": str(path)}]}


def settings(**changes):
    return {
        "learning_rate": 1e-2, "batch_size": 5, "micro_batch_size": 2, "epochs": 3,
        "lr_schedule": "constant", "sample_tokens": 8, "samples": 1, **changes,
    }  # fmt: skip


def test_complaint_trl1623_peers1_dsc8_an_overfit_model_answers_and_ends(
    tiny_lm, run_stage, eval_file
):
    run = run_stage("sft", ROWS, tiny_lm, data=eval_file, **settings(batch_size=8, epochs=150))
    # Plain transformers, from the directory alone.
    model = tf.AutoModelForCausalLM.from_pretrained(run["model"])
    tokenizer = tf.AutoTokenizer.from_pretrained(run["model"])
    assert model.config.use_cache
    for row in ROWS:
        ids = tokenizer(row["prompt"], return_tensors="pt").input_ids
        output = model.generate(ids, do_sample=False, max_new_tokens=20)[0, ids.shape[1] :]
        # Padding is EOS here: one EOS, at the end, means that it was learnt and not masked.
        assert output[-1] == tokenizer.eos_token_id
        assert tokenizer.decode(output, skip_special_tokens=True) == row["response"]
    assert run["metrics"][-2]["loss"] < 0.05
    assert run["metrics"][-2]["accuracy"] == 1.0


def test_reported_perplexity_is_that_of_plain_transformers(tiny_lm, run_stage, eval_file):
    run = run_stage("sft", ROWS, tiny_lm, data=eval_file, **settings())
    tokenizer = tf.AutoTokenizer.from_pretrained(tiny_lm)
    for when, path in (("before", tiny_lm), ("after", run["model"])):
        model = tf.AutoModelForCausalLM.from_pretrained(path)
        nll = tokens = 0
        for row in EVAL:
            prompt = tokenizer(row["prompt"]).input_ids
            answer = [*tokenizer(row["response"]).input_ids, tokenizer.eos_token_id]
            labels = torch.tensor([[-100] * len(prompt) + answer])
            with torch.no_grad():
                loss = model(torch.tensor([prompt + answer]), labels=labels).loss
            nll, tokens = nll + loss.item() * len(answer), tokens + len(answer)
        assert run["result"]["eval_perplexity"][when] == pytest.approx(
            math.exp(nll / tokens), rel=1e-4
        )
    assert run["result"]["eval_perplexity"]["before"] != run["result"]["eval_perplexity"]["after"]


def test_metrics_and_result(tiny_lm, run_stage, eval_file):
    run = run_stage("sft", ROWS, tiny_lm, data=eval_file, **settings(eval_every=2))
    train = [r for r in run["metrics"] if r["kind"] == "train"]
    evaluations = [r["step"] for r in run["metrics"] if r["kind"] == "eval"]
    assert [r["step"] for r in train] == [1, 2, 3, 4, 5, 6]  # 8 rows in fives, three times
    assert evaluations == [0, 2, 4, 6]
    for record in train:
        assert record["total_steps"] == 6
        assert record["lr"] == 1e-2
        assert record["grad_norm"] > 0
        assert record["tokens_per_second"] > 0
    result = run["result"]
    assert result["steps"] == 6
    assert result["rows"]["train"] == 8
    assert result["rows"]["eval"] == 2
    assert [set(sample) for sample in result["samples"]] == [{"prompt", "response"}]


@pytest.mark.parametrize(
    ("ranks", "zero_stage", "micro"), [(1, 0, 8), (2, 0, 1), (1, 2, 2), (2, 2, 3), (2, 3, 2)]
)
def test_every_layout_trains_the_same_model(
    tiny_lm, run_stage, eval_file, ranks, zero_stage, micro
):
    one = run_stage("sft", ROWS, tiny_lm, data=eval_file, **settings(weight_decay=0.1))
    many = run_stage(
        "sft", ROWS, tiny_lm, ranks=ranks, data=eval_file,
        **settings(weight_decay=0.1, zero_stage=zero_stage, micro_batch_size=micro),
    )  # fmt: skip
    for a, b in zip(one["metrics"], many["metrics"], strict=True):
        assert (a["kind"], a["step"]) == (b["kind"], b["step"])
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-3)
    first = many["metrics"][1]
    assert first["grad_norm"] == pytest.approx(one["metrics"][1]["grad_norm"], rel=1e-4)
    assert many["result"]["steps"] == one["result"]["steps"]
    assert tf.AutoModelForCausalLM.from_pretrained(many["model"]).lm_head.weight.abs().sum() > 0
    # Greedy answers of equal weights, whichever ranks hold them.
    assert many["result"]["samples"] == one["result"]["samples"] != []


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_bf16(tiny_lm, run_stage, eval_file, zero_stage):
    run = run_stage(
        "sft", ROWS, tiny_lm, data=eval_file, dtype="bf16", **settings(zero_stage=zero_stage)
    )
    model = tf.AutoModelForCausalLM.from_pretrained(run["model"])
    assert model.dtype == torch.bfloat16
    losses = [r["loss"] for r in run["metrics"] if r["kind"] == "train"]
    assert losses[-1] < losses[0]
