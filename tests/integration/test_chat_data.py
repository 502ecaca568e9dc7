"""A chat run: template by file, loss on every turn, rows cut by turns, on one rank and two."""

from __future__ import annotations

import json
import math

import pytest
import torch
import transformers as tf

pytestmark = pytest.mark.slow

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}A{% generation %}"
    "{{ m.content }}{{ eos_token }}{% endgeneration %}{% else %}{{ m.role[0] }}{{ m.content }};"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}A{% endif %}"
)


def talk(number, turns=2):
    said = []
    for i in range(turns):
        said += [("user", f"q{number}.{i}"), ("assistant", f"yes {number * i}.")]
    return {"messages": [{"role": role, "content": content} for role, content in said]}


ROWS = [talk(i) for i in range(12)]
LONG = [talk(i, turns=20) for i in range(20, 23)]  # beyond the 128 positions
EVAL = [talk(i) for i in (50, 51, 52)]


def perplexity(directory, template):
    """Plain transformers: its template, its mask, its loss."""
    model = tf.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokenizer = tf.AutoTokenizer.from_pretrained(directory)
    nll, tokens = 0.0, 0
    for row in EVAL:
        found = tokenizer.apply_chat_template(
            row["messages"], chat_template=template, tokenize=True, return_dict=True,
            return_assistant_tokens_mask=True,
        )  # fmt: skip
        ids, mask = (torch.tensor([found[key]]) for key in ("input_ids", "assistant_masks"))
        labels = torch.where(mask.bool(), ids, -100)
        number = int((labels[:, 1:] != -100).sum())
        nll += float(model(input_ids=ids, labels=labels).loss.detach()) * number
        tokens += number
    return math.exp(nll / tokens)


def test_every_turn_is_learnt_and_ranks_agree(tiny_lm, run_stage, tmp_path):
    (tmp_path / "mine.jinja").write_text(TEMPLATE)
    (tmp_path / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in EVAL))
    data = {
        "eval": [{"path": str(tmp_path / "eval.jsonl")}], "chat_format": "auto",
        "chat_template": str(tmp_path / "mine.jinja"), "sft_loss_on": "assistant_turns",
        "truncation": {"sft": "keep_last_turns"},
        "blend": {"temperature": 2, "exhaustion": "first_exhausted"},
    }  # fmt: skip
    runs = [
        run_stage(
            "sft", [*ROWS, *LONG], tiny_lm, ranks=ranks, data=dict(data), learning_rate=1e-2,
            batch_size=4, micro_batch_size=2, epochs=2, samples=1, sample_tokens=4,
        )
        for ranks in (1, 2)
    ]  # fmt: skip
    for run in runs:
        rows = run["result"]["rows"]
        assert (rows["train"], rows["eval"]) == (15, 3)
        assert rows["dropped"] == {"oldest turns left out (kept)": 3}
        before, after = (run["result"]["eval_perplexity"][when] for when in ("before", "after"))
        assert before == pytest.approx(perplexity(tiny_lm, TEMPLATE), rel=1e-4)
        # The artifact brings the template along.
        assert after == pytest.approx(perplexity(run["model"], None), rel=1e-3)
        assert after < before / 2
        assert tf.AutoTokenizer.from_pretrained(run["model"]).chat_template == TEMPLATE
    losses = [[m["loss"] for m in run["metrics"] if m["kind"] == "train"] for run in runs]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
