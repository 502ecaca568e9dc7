"""keep_best in real runs: the artifact is the weights of the evaluation that was told to be best.

The stages run in this process. Evaluations are real, but the number to choose by is planted, so
that the best is neither the first nor the last; the weights are copied as each is made.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlhf_app.config.schema import RunConfig
from rlhf_app.models.lora import merge_state
from rlhf_app.models.scalar_head import read_reward_facts
from rlhf_app.run_directory import RunDirectory
from rlhf_app.training.distributed import Dist
from rlhf_app.training.saving import gather_state_dict

pytestmark = pytest.mark.slow

PAIRS = [
    {"prompt": f"{i:02d} ", "chosen": "yes" * (1 + i % 3), "rejected": "no" * (1 + i % 4)}
    for i in range(16)
]
DIST = Dist(0, 0, 1, torch.device("cpu"))
TRAINED = {"learning_rate": 1e-3, "lr_schedule": "constant", "warmup_ratio": 0.0}
BATCHES = {"batch_size": 4, "micro_batch_size": 4, "epochs": 2, "max_steps": 4, "eval_every": 1}


@pytest.fixture
def start(tiny_lm, tmp_path):
    """Runs a stage here; returns its directory, result.json and metrics records."""

    def run(stage, **settings):
        data = tmp_path / "pairs.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
        out = RunDirectory(tmp_path / "out")
        values = {
            "output_dir": str(out.path), "stages": [stage],
            "model": {"actor": str(tiny_lm), "reward": settings.pop("reward_model", None)},
            "gold": {"scorer": settings.pop("gold", None)},
            "data": {
                "sources": [{"path": str(data)}], "split": "shared", "chat_format": "plain",
                "eval_fraction": 0.25,
            },
            stage: settings,
        }  # fmt: skip
        import importlib

        # A stage goes on from what it finds; the controller removes it when one is finished.
        shutil.rmtree(out.checkpoints(stage), ignore_errors=True)
        importlib.import_module(f"stages.{stage}.train").main(RunConfig(**values), out)
        lines = out.metrics(stage).read_text().splitlines()
        result = json.loads(out.result(stage).read_text())
        return out, result, [json.loads(line) for line in lines]

    return run


def plant(monkeypatch, name, numbers, models_of):
    # `name` is the stage's evaluation function, where it is called; `numbers` holds the values of
    # each field from the evaluation before the first step on; `models_of` maps the arguments of
    # that function to the models in training. Returns copies of their weights, one a call.
    import importlib

    module = importlib.import_module(name.rpartition(".")[0])
    real = getattr(module, name.rpartition(".")[2])
    copies = []

    def evaluate(*args, **kwargs):
        found = real(*args, **kwargs)
        models = models_of(*args).items()
        # With adapters: merged, as an artifact is.
        copies.append({k: merge_state(m, gather_state_dict(m, DIST)) for k, m in models})
        changed = {field: values[len(copies) - 1] for field, values in numbers.items()}
        return dataclasses.replace(found, **changed)

    monkeypatch.setattr(name, evaluate)
    return copies


def assert_saved(directory: Path, state, *, renamed=lambda name: name):
    saved = load_file(directory / "model.safetensors")
    state = {renamed(name): tensor for name, tensor in state.items()}
    assert saved
    for name, tensor in saved.items():
        assert torch.equal(tensor, state[name]), name


def differ(one, other):
    return any(not torch.equal(one[name], other[name]) for name in one)


def scalar_name(name):
    """From our modules' names to those on disk."""
    return name.replace("backbone.", "model.").replace("head.", "score.")


@pytest.mark.parametrize("rank", [0, 4])
def test_sft(start, monkeypatch, rank):
    tokens = 100.0
    losses = [0.1, 3.0, 1.5, 1.5, 2.0]  # that of the start takes no part; the first 1.5 wins
    planted = {"nll": [loss * tokens for loss in losses], "tokens": [tokens] * 5}
    copies = plant(monkeypatch, "stages.sft.train.evaluate", planted, lambda e, *_: {"m": e.module})
    lora = {"rank": rank, "learning_rate": 1e-2}
    out, result, metrics = start(
        "sft", keep_best="loss", samples=2, lora=lora, **BATCHES, **TRAINED
    )
    assert result["kept"] == {"step": 2, "metric": "loss", "value": 1.5}
    assert result["eval_perplexity"]["after"] == pytest.approx(2.718281828**1.5)
    assert differ(copies[2]["m"], copies[4]["m"])
    assert_saved(out.artifact("sft"), copies[2]["m"])
    assert [r["loss"] for r in metrics if r["kind"] == "eval"] == losses
    assert len(result["samples"]) == 2


def test_saving_on_the_way_changes_no_step(start, tiny_lm, tmp_path):
    _, _, plain = start("sft", samples=2, **BATCHES, **TRAINED)
    _, _, kept = start("sft", keep_best="loss", samples=2, **BATCHES, **TRAINED)
    assert [r["loss"] for r in kept] == [r["loss"] for r in plain]


def test_reward_model_with_the_statistics_of_its_own_evaluation(start, monkeypatch):
    planted = {
        "accuracy": [1.0, 0.5, 0.75, 0.75, 0.25], "mean": [9.0, 1.0, 2.0, 3.0, 4.0],
        "std": [9.0, 0.1, 0.2, 0.3, 0.4],
    }  # fmt: skip
    copies = plant(
        monkeypatch, "stages.reward.train.evaluate", planted, lambda e, *_: {"m": e.module}
    )
    out, result, metrics = start("reward", keep_best="accuracy", **BATCHES, **TRAINED)
    assert result["kept"] == {"step": 2, "metric": "accuracy", "value": 0.75}
    assert (result["eval_accuracy"], result["score_mean"], result["score_std"]) == (0.75, 2.0, 0.2)
    assert result["evaluation"]["accuracy"] == 0.75
    stats = read_reward_facts(str(out.artifact("reward"))).stats
    assert (stats.mean, stats.std) == (2.0, 0.2)
    assert differ(copies[2]["m"], copies[4]["m"])
    assert_saved(out.artifact("reward"), copies[2]["m"], renamed=scalar_name)
    at_step_2 = next(r for r in metrics if r["kind"] == "eval" and r["step"] == 2)
    for name in ("calibration", "longer_wins", "shorter_wins", "score_length_correlation"):
        assert at_step_2[name] == result["evaluation"][name] is not None


def letters(prompts, answers):
    return [float(len(answer)) for answer in answers]


def ppo_settings(tiny_lm, tmp_path, gold):
    """A tiny PPO run of four updates, against a random reward model."""
    from transformers import AutoTokenizer

    from rlhf_app.models.scalar_head import RewardFacts, new_scalar_model, save_scalar_model

    reward = new_scalar_model(str(tiny_lm), dtype=torch.float32, device=torch.device("cpu"), seed=3)
    tokenizer = AutoTokenizer.from_pretrained(tiny_lm)
    facts = RewardFacts(eos_token_ids=(0,), chat_format="plain")
    import rlhf_app.training.distributed as distributed

    dist = distributed.setup()
    save_scalar_model(reward, tokenizer, tmp_path / "rm", dist, facts)
    return {
        "actor": TRAINED, "critic": TRAINED, "updates": 4, "eval_every": 1,
        "rollout_batch_size": 4, "micro_batch_size": 4, "max_prompt_length": 8,
        "max_response_length": 6, "samples": 2, "reward_model": str(tmp_path / "rm"),
        "gold": f"{__file__}:letters" if gold else None,
    }  # fmt: skip


def ppo_models(sampler, policy, models, *_):
    return {"actor": models.actor.module, "critic": models.critic.module}


def test_ppo_actor_and_critic_of_the_same_step(start, monkeypatch, tiny_lm, tmp_path):
    planted = {"gold": [9.0, 1.0, 3.0, 5.0, 2.0], "kl_per_answer": [0.0, 1.0, 2.0, 8.5, 3.0]}
    copies = plant(monkeypatch, "stages.ppo.held_out.evaluate_policy", planted, ppo_models)
    out, result, metrics = start(
        "ppo", keep_best="gold", keep_best_max_kl=8.0, **ppo_settings(tiny_lm, tmp_path, True)
    )
    # Update 3 has more gold, but too much KL.
    assert result["kept"] == {"step": 2, "metric": "gold", "value": 3.0}
    kept, last = copies[2], copies[4]
    assert differ(kept["actor"], last["actor"])
    assert differ(kept["critic"], last["critic"])
    assert_saved(out.artifact("ppo"), kept["actor"])
    assert_saved(out.critic, kept["critic"], renamed=scalar_name)
    at_step_2 = next(r for r in metrics if r["kind"] == "eval" and r["step"] == 2)
    assert result["policies"]["ppo"] == {
        k: v for k, v in at_step_2.items() if k not in ("kind", "step", "total_steps", "time")
    }
    check_samples(out, result)


def check_samples(out, result):
    """Five evaluations of the same two prompts; the kept policy's answers are the result's."""
    rows = [json.loads(line) for line in out.samples.read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    prompts = [sample["prompt"] for sample in result["samples"]]
    assert [row["prompt"] for row in rows] == prompts * 5
    assert [row["answer"] for row in rows[4:6]] == [s["ppo"] for s in result["samples"]]
    assert [row["answer"] for row in rows[:2]] == [s["sft"] for s in result["samples"]]
    for row in rows:
        assert set(row) == {
            "step", "prompt", "answer", "reward", "gold", "kl", "tokens", "stopped",
        }  # fmt: skip
        assert row["gold"] == len(row["answer"])
        # Every byte is a token, and so is EOS.
        assert row["tokens"] <= 6
        assert (row["tokens"] < 6) <= row["stopped"]
    assert all(row["kl"] == 0.0 for row in rows[:2])
    assert all(row["kl"] != 0.0 for row in rows[2:])


def test_ppo_where_none_qualifies(start, monkeypatch, tiny_lm, tmp_path, caplog):
    planted = {"kl_per_answer": [0.0, 9.0, 9.0, 9.0, 9.0]}
    copies = plant(monkeypatch, "stages.ppo.held_out.evaluate_policy", planted, ppo_models)
    out, result, _ = start(
        "ppo", keep_best="reward", keep_best_max_kl=8.0, **ppo_settings(tiny_lm, tmp_path, False)
    )
    assert result["kept"]["step"] == 4
    assert_saved(out.artifact("ppo"), copies[4]["actor"])
    assert "the last weights are kept" in caplog.text


def test_two_ranks_with_split_weights_keep_what_one_does(run_stage, tiny_lm):
    """Learning rates so large that the held-out loss rises again: nothing is planted."""
    settings = BATCHES | TRAINED | {"learning_rate": 3e-2, "epochs": 4, "max_steps": 10}
    settings |= {"keep_best": "loss", "samples": 1, "data": {"eval_fraction": 0.25}}
    alone = run_stage("sft", PAIRS, tiny_lm, **settings)
    losses = {r["step"]: r["loss"] for r in alone["metrics"] if r["kind"] == "eval" and r["step"]}
    best = min(losses, key=losses.__getitem__)
    assert best < 10
    assert alone["result"]["kept"] == {"step": best, "metric": "loss", "value": losses[best]}
    split = run_stage(
        "sft", PAIRS, tiny_lm, ranks=2, **settings | {"zero_stage": 3, "micro_batch_size": 2}
    )
    assert split["result"]["kept"]["step"] == best
    assert split["result"]["samples"] == alone["result"]["samples"]
    mine, theirs = (load_file(run["model"] / "model.safetensors") for run in (alone, split))
    for name, tensor in mine.items():
        torch.testing.assert_close(theirs[name], tensor, rtol=1e-3, atol=1e-3, msg=name)
