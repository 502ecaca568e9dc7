"""All three stages with adapters, in processes of their own, on one and two ranks."""

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.slow

ROWS = [
    {"prompt": f"{i:02d} ", "chosen": "yes" * (1 + i % 3), "rejected": "no" * (1 + i % 4)}
    for i in range(24)
]
LORA = {"rank": 8, "learning_rate": 1e-2}
DATA = {"eval_fraction": 0.25}
SFT = {"lora": LORA, "epochs": 4, "batch_size": 6, "micro_batch_size": 3, "data": DATA}
PPO = {
    "actor": {"lora": LORA},
    "critic": {"lora": LORA},
    "updates": 2,
    "rollout_batch_size": 8,
    "ppo_epochs": 2,
    "mini_batches": 2,
    "micro_batch_size": 2,
    "max_prompt_length": 8,
    "max_response_length": 6,
    "data": DATA,
}
IDS = torch.arange(5, 25).view(2, 10)


def frozen_part(artifact: Path, base: Path) -> dict[str, torch.Tensor]:
    """Weights of the artifact that must be the base's to the bit: all but adapted layers."""
    mine, theirs = (load_file(path / "model.safetensors") for path in (artifact, base))
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        adapted = name.endswith("proj.weight")
        assert torch.equal(value, theirs[name]) != adapted, name
    return mine


def test_complaint_peers22_three_stages_of_adapters_keep_their_reference(run_stage, tiny_lm):
    sft = run_stage("sft", ROWS, tiny_lm, **SFT)
    perplexity = sft["result"]["eval_perplexity"]
    assert perplexity["after"] < 0.7 * perplexity["before"]
    assert sft["metrics"][1]["lr"] <= 1e-2  # the adapters' own rate; the base's is 1e-5
    assert max(record.get("lr", 0.0) for record in sft["metrics"]) > 5e-3
    frozen_part(sft["model"], tiny_lm)
    merged = AutoModelForCausalLM.from_pretrained(sft["model"]).eval()
    base = AutoModelForCausalLM.from_pretrained(tiny_lm).eval()
    adapted = PeftModel.from_pretrained(base, str(sft["model"] / "adapter")).eval()
    with torch.no_grad():
        policy = adapted(IDS).logits
        assert torch.allclose(merged(IDS).logits, policy, atol=1e-4)
        with adapted.disable_adapter():
            assert not torch.allclose(adapted(IDS).logits, policy, atol=0.1)

    reward = run_stage(
        "reward", ROWS, sft["model"], lora=LORA, epochs=3, batch_size=6, micro_batch_size=6,
        data=DATA,
    )  # fmt: skip
    assert reward["result"]["eval_accuracy"] >= 0.75
    assert (reward["model"] / "adapter" / "adapter_model.safetensors").is_file()

    ppo = run_stage("ppo", ROWS, sft["model"], reward_model=str(reward["model"]), **PPO)
    # The reference is the fine-tuned policy, although that was trained as an adapter: another
    # adapter switched off over the first base would be the base model.
    assert ppo["metrics"][1]["kl_per_answer"] == 0.0
    assert ppo["metrics"][1]["first_ratio"] == 1.0
    assert ppo["metrics"][2]["kl_per_answer"] != 0.0
    policies = ppo["result"]["policies"]
    assert policies["sft"]["kl_per_answer"] == 0.0
    actor = ppo["model"].parent / "actor"
    frozen_part(actor, sft["model"])
    assert (actor / "adapter" / "adapter_config.json").is_file()
    critic = load_file(ppo["model"].parent / "critic" / "model.safetensors")
    assert not [name for name in critic if "lora" in name or "reward" in name]


def test_ranks_and_zero_stages_agree_with_one_process(run_stage, tiny_lm):
    reward = run_stage(
        "reward", ROWS, tiny_lm, learning_rate=1e-3, batch_size=4, micro_batch_size=4, data=DATA
    )
    runs = []
    for ranks, zero in ((1, 0), (2, 3)):
        settings = {role: {"lora": LORA, "zero_stage": zero} for role in ("actor", "critic")}
        runs.append(
            run_stage(
                "ppo", ROWS, tiny_lm, ranks=ranks, reward_model=str(reward["model"]),
                **(PPO | settings),
            )
        )  # fmt: skip
    names = ("loss", "value_loss", "reward", "kl_per_answer", "entropy", "grad_norm")
    for mine, theirs in zip(runs[0]["metrics"], runs[1]["metrics"], strict=True):
        for name in names:
            if name in mine:
                assert theirs[name] == pytest.approx(mine[name], rel=5e-3, abs=5e-4), name
    paths = [run["model"].parent / "actor" for run in runs]
    alone, sharded = (load_file(path / "model.safetensors") for path in paths)
    for name, value in alone.items():
        assert torch.allclose(value, sharded[name], atol=1e-3), name
    frozen_part(paths[1], tiny_lm)


def test_sharded_fine_tuning_saves_the_same_model(run_stage, tiny_lm):
    saved = []
    for ranks, zero in ((1, 0), (2, 3)):
        done = run_stage(
            "sft", ROWS, tiny_lm, ranks=ranks, torchrun=ranks > 1, zero_stage=zero, **SFT
        )
        saved.append(frozen_part(done["model"], tiny_lm))
        assert done["result"]["samples"]
    for name, value in saved[0].items():
        assert torch.allclose(value, saved[1][name], atol=1e-3), name
