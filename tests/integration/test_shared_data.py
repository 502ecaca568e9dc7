"""Every real file through `rlhf data stats` and one step of each stage that its rows allow.

All in this process, and on the same three tiny engines for all files: loading, recognition,
split, encoding, batches and optimizer steps are those of the stages. Whole stages, in processes
of their own, are tested elsewhere.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from data_sources.examples import (
    pair_examples,
    prompt_examples,
    sft_examples,
    target_tokens,
)
from data_sources.stage_data import load_stage_data
from rlhf_app.commands.data_stats import stats
from rlhf_app.config.schema import RunConfig
from rlhf_app.errors import ConfigError

pytestmark = pytest.mark.slow

# Whether a file holds pairs; the others have answers alone.
FILES = {
    "docta/orca_dpo_pairs_demo.csv": True,
    "dolly/dolly_sample.jsonl": False,
    "dschat-extension/reward_train.parquet": True,
    "dschat-extension/reward_with_scores_train.parquet": True,
    "fastchat/dummy_conversation.json": False,
    "hh-rlhf/harmless-base-test.jsonl.gz": True,
    "llamafactory/dpo_en_demo.json": True,
    "llamafactory/glaive_toolcall_en_demo.json": False,
    "llamafactory/kto_en_demo.json": False,
    "medicalgpt/dpo_zh_500.jsonl": True,
    "nemo-aligner/dummy-dpo.jsonl": True,
    "nemo-aligner/dummy-sft.jsonl": False,
    "oasst/en_100_tree.jsonl": True,
    "oasst/oasst1-en-validation.jsonl": True,
    "rlhf-length-biases/data-00000-of-00001.arrow": True,
    "torchtune/chat_tiny.json": False,
    "torchtune/hh_rlhf_tiny.json": True,
    "torchtune/instruct_tiny.json": False,
    "torchtune/stack_exchange_paired_tiny.json": True,
    "transformers_tasks/rm_sentiment_comments.jsonl": True,
    "ultrafeedback/eval_clean.jsonl": True,
    "ultrafeedback/train_clean.jsonl": True,
}
# Classifier rows, with their turns in one text and a number for it: of no stage.
REFUSED = "nemo-aligner/test-rm.jsonl"
LENGTH = 1024  # the tokens of the tiny model are bytes
ROWS = 2
ENCODED = 40  # of each file: enough for a step, and cheap


@pytest.fixture(scope="module")
def held_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is evaluated on, so that files of one row have it to train on."""
    path = tmp_path_factory.mktemp("held_out") / "held_out.jsonl"
    row = {"prompt": "a prompt that no file has", "chosen": "yes", "rejected": "no"}
    path.write_text(json.dumps(row))
    return path


def run_config(data: Path, held_out: Path, model: Path) -> RunConfig:
    """Rows beyond the limit are cut, so that a file of long ones has some to train on."""
    score = held_out.with_name("score.py")
    score.write_text("def length(prompts, responses):\n    return [len(r) for r in responses]\n")
    return RunConfig.model_validate(
        {
            "model": {"actor": str(model)},
            "data": {
                "sources": [{"path": str(data)}],
                "eval": [{"path": str(held_out)}],
                "split": "shared",
                "truncation": {"sft": "right", "reward": "right", "ppo": "left"},
            },
            "hybrid_engine": {"enabled": False},
            "ppo": {
                "rollout_batch_size": ROWS,
                "micro_batch_size": ROWS,
                "max_prompt_length": 120,  # of the model's 128
                "max_response_length": 4,
                "rewards": [{"function": f"{score}:length"}],
            },
        }
    )


Steps = dict[str, Callable[[list[Any], RunConfig], dict[str, float]]]


@pytest.fixture(scope="module")
def steps(tiny_lm: Path, held_out: Path) -> Iterator[Steps]:
    """Stage -> one optimizer step on the first examples, on an engine that all files share."""
    import torch

    from rlhf_app.models.load import load_causal_lm
    from rlhf_app.models.scalar_head import new_scalar_model
    from rlhf_app.training.accumulate import optimizer_step
    from rlhf_app.training.cross_entropy import cross_entropy
    from rlhf_app.training.deepspeed_config import engine_for
    from rlhf_app.training.distributed import close, setup
    from stages.ppo.models import load_models
    from stages.ppo.prompts import rank_uids
    from stages.ppo.rollout import collect
    from stages.ppo.update import update_models
    from stages.reward import batches as reward_batches
    from stages.reward.loss import final_token_loss
    from stages.sft import batches as sft_batches

    dist = setup()
    config = run_config(held_out, held_out, tiny_lm)
    common = {"dtype": torch.float32, "micro_batch_size": ROWS, "total_steps": 100, "dist": dist}
    lm = load_causal_lm(str(tiny_lm), dtype=torch.float32, device=dist.device)
    sft = engine_for(lm, config.sft, **common)
    scalar = new_scalar_model(str(tiny_lm), dtype=torch.float32, device=dist.device, seed=0)
    reward = engine_for(scalar, config.reward, **common)
    ppo = load_models(config, {"actor": str(tiny_lm), "base": str(tiny_lm)}, dist, 100)

    def sft_step(rows: list[Any], run: RunConfig) -> dict[str, float]:
        batch = sft_batches.collate(rows, "response", 0, dist.device, limit=LENGTH, filler=rows[0])
        tokens = sum(target_tokens(row, "response") for row in rows)
        stats = optimizer_step(sft, [batch], lambda b: cross_entropy(sft, b), tokens, dist)
        return {"loss": stats.loss, "grad_norm": stats.grad_norm}

    def reward_step(rows: list[Any], run: RunConfig) -> dict[str, float]:
        batch = reward_batches.collate(
            rows, 0, dist.device, limit=LENGTH, use_margin=False, filler=rows[0]
        )

        def loss(b: Any) -> Any:
            chosen, rejected = b.at_last(reward(b.input_ids_2BT))
            return final_token_loss(chosen, rejected, b.margin_B, b.weight_B, 0.0)

        stats = optimizer_step(reward, [batch], loss, len(rows), dist)
        return {"loss": stats.loss, "grad_norm": stats.grad_norm}

    def ppo_step(rows: list[Any], run: RunConfig) -> dict[str, float]:
        rows = (rows * ROWS)[:ROWS]  # a file of one prompt answers it twice
        uids = rank_uids(run.ppo, dist)
        shared = {"seed": 0, "update": 1, "kl_coef": 0.1}
        rollout = collect(ppo, rows, uids, run.ppo, dist, **shared)
        return update_models(ppo, rollout.experience, run.ppo, dist, **shared)

    yield {"sft": sft_step, "reward": reward_step, "ppo": ppo_step}
    close()


def encoded(run: RunConfig, stage: str, model: Path) -> tuple[list[Any], int]:
    """(examples of the first rows, records that the stage was given); every row is counted."""
    from rlhf_app.models.chat_format import ChatFormat
    from rlhf_app.models.tokenizer import load_tokenizer, tokenizer_hash

    tokenizer = load_tokenizer(str(model))
    fmt, tokenizer_id = ChatFormat(tokenizer), tokenizer_hash(tokenizer)
    data = load_stage_data(run, stage)
    make, limit = {
        "sft": (sft_examples, LENGTH),
        "reward": (pair_examples, LENGTH),
        "ppo": (prompt_examples, run.ppo.max_prompt_length),
    }[stage]
    truncation = getattr(run.data.truncation, stage)
    records = data.train[:ENCODED]
    examples, reasons = make(records, fmt, tokenizer_id, limit, truncation=truncation)
    lost = sum(n for reason, n in reasons.items() if not reason.endswith("(kept)"))
    assert len(examples) + lost == len(records)
    part = data.counts.stages[stage]
    assert part.candidates == part.train + part.evaluation + part.dropped.total()
    return examples, part.candidates - part.evaluation


def table(data: Path, held_out: Path) -> dict[str, Any]:
    app = typer.Typer()
    app.command()(stats)
    # Files of a few rows hold none out themselves.
    sources = ["--data", str(data), "--eval-data", str(held_out)]
    done = CliRunner().invoke(app, [*sources, "--data-split", "shared", "--json"])
    if done.exception:
        raise done.exception
    return json.loads(done.output)


def test_no_file_is_left_out(shared_dir):
    data = shared_dir / "data"
    found = {str(p.relative_to(data)) for p in data.rglob("*") if p.is_file() and p.suffix}
    assert found == {*FILES, REFUSED}


def test_the_file_of_no_stage_is_refused(shared_dir, held_out):
    with pytest.raises(ConfigError, match="columns text, label fit no known shape"):
        table(shared_dir / "data" / REFUSED, held_out)


@pytest.mark.parametrize("name", FILES)
def test_stats_and_one_step_of_each_stage(shared_dir, tiny_lm, held_out, steps, name):
    data = shared_dir / "data" / name
    source = table(data, held_out)["sources"][0]
    assert source["rows"] == source["usable"] + sum(bad["rows"] for bad in source["bad_rows"])
    assert sum(source["prompt_scripts"].values()) == source["records"] > 0

    run = run_config(data, held_out, tiny_lm)
    for stage, step in steps.items():
        if stage == "reward" and not FILES[name]:
            with pytest.raises(ConfigError, match="stage reward has nothing to train on"):
                load_stage_data(run, stage)
            continue
        examples, given = encoded(run, stage, tiny_lm)
        assert given == source["records"]
        numbers = step(examples[:ROWS], run)
        assert math.isfinite(numbers["loss"])
        assert 0 < numbers["grad_norm"] < math.inf
