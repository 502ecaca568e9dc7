"""The PPO stage in processes of its own: ranks and ZeRO stages, artifacts, results."""

import json
import math
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow

PAIRS = [
    {"prompt": f"{i:02d} ", "chosen": "yes" * (1 + i % 3), "rejected": "no" * (1 + i % 4)}
    for i in range(24)
]
PPO = {
    "actor": {"learning_rate": 1e-3, "weight_decay": 0.01},
    "critic": {"learning_rate": 1e-3},
    "updates": 2,
    "rollout_batch_size": 8,
    "ppo_epochs": 2,
    "mini_batches": 2,
    "micro_batch_size": 2,
    "max_prompt_length": 8,
    "max_response_length": 6,
    "data": {"eval_fraction": 0.25},
}
COMPARED = (
    "loss", "value_loss", "reward", "kl_per_answer", "entropy", "answer_length",
    "grad_norm", "critic_grad_norm", "explained_variance", "distinct_3", "reward_std",
    "reward_length_correlation",
)  # fmt: skip


@pytest.fixture
def reward_model(run_stage, tiny_lm) -> str:
    done = run_stage(
        "reward", PAIRS, tiny_lm, learning_rate=1e-3, batch_size=4, micro_batch_size=4,
        data={"eval_fraction": 0.25},
    )  # fmt: skip
    return str(done["model"])


def compared(records):
    return [{k: r[k] for k in COMPARED if r.get(k) is not None} for r in records]


def with_zero(actor: int, critic: int) -> dict:
    return PPO | {
        "actor": PPO["actor"] | {"zero_stage": actor},
        "critic": PPO["critic"] | {"zero_stage": critic},
    }


def test_complaint_peers7_ranks_and_zero_stages_agree_with_one_process(
    run_stage, tiny_lm, reward_model
):
    """Same global batch, so the same steps: two ranks only add numbers in another order."""
    alone = run_stage("ppo", PAIRS, tiny_lm, reward_model=reward_model, **PPO)
    assert alone["metrics"][1]["first_ratio"] == 1.0
    assert alone["metrics"][1]["kl_per_answer"] == 0.0
    assert alone["metrics"][1]["optimizer_steps"] == 4
    assert alone["metrics"][2]["kl_per_answer"] != 0.0
    for ranks, zero in ((1, (2, 2)), (2, (0, 0)), (2, (2, 3))):
        other = run_stage(
            "ppo", PAIRS, tiny_lm, ranks=ranks, torchrun=zero == (2, 3),
            reward_model=reward_model, **with_zero(*zero),
        )  # fmt: skip
        for mine, theirs in zip(
            compared(alone["metrics"]), compared(other["metrics"]), strict=True
        ):
            assert theirs == pytest.approx(mine, rel=2e-3, abs=2e-4), (ranks, zero)


@pytest.mark.parametrize("pinned", [True, False])
def test_a_split_actor_learns_as_a_whole_one(pinned, run_stage, tiny_lm, reward_model):
    """ZeRO-3 for actor and critic on two ranks, whose evaluations have unlike numbers of prompts.

    5 held-out prompts: one rank answers 3, the other 2; under ZeRO-3 both run 3. Answers end
    anywhere between 1 and 6 tokens, so ranks stop at different lengths.
    """
    held_out = {"eval_prompts": 5, "samples": 5, "eval_every": 1, "keep_best": "reward"}
    settings = with_zero(3, 3) | held_out
    alone = run_stage("ppo", PAIRS, tiny_lm, reward_model=reward_model, **PPO | held_out)
    split = run_stage(
        "ppo", PAIRS, tiny_lm, ranks=2, reward_model=reward_model,
        hybrid_engine={"pin_parameters": pinned, "tp_gather_partition_size": 1}, **settings,
    )  # fmt: skip
    assert split["result"]["samples"] == alone["result"]["samples"]  # sampled answers, as text
    assert split["result"]["kept"]["step"] == alone["result"]["kept"]["step"]
    for mine, theirs in zip(compared(alone["metrics"]), compared(split["metrics"]), strict=True):
        assert theirs == pytest.approx(mine, rel=2e-3, abs=2e-4)
    assert split["metrics"][1]["first_ratio"] == 1.0
    assert split["metrics"][1]["kl_per_answer"] == 0.0
    weights = [weights_of_actor(run) for run in (alone, split)]
    for name, weight in weights[0].items():
        torch.testing.assert_close(weights[1][name], weight, rtol=1e-3, atol=2e-4, msg=name)


def weights_of_actor(run):
    from transformers import AutoModelForCausalLM

    actor = Path(run["model"]).parent / "actor"
    return AutoModelForCausalLM.from_pretrained(actor).state_dict()


def test_artifacts_load_in_plain_transformers_and_results_are_complete(
    run_stage, tiny_lm, reward_model
):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    done = run_stage("ppo", PAIRS, tiny_lm, reward_model=reward_model, **PPO)
    actor = Path(done["model"]).parent / "actor"
    model = AutoModelForCausalLM.from_pretrained(actor)
    tokenizer = AutoTokenizer.from_pretrained(actor)
    before = AutoModelForCausalLM.from_pretrained(tiny_lm)
    assert any(
        not torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters(), strict=True)
    )
    ids = tokenizer("ab", return_tensors="pt")
    assert model.generate(**ids, max_new_tokens=3).shape[0] == 1
    assert (actor.parent / "critic" / "model.safetensors").is_file()
    result = done["result"]
    assert result["updates"] == 2
    assert set(result["policies"]) == {"base", "sft", "ppo"}
    for numbers in result["policies"].values():
        # No correlation where all answers are equally long.
        assert set(numbers) - {"reward_length_correlation"} == {
            "reward", "reward_std", "kl_per_answer", "entropy", "distinct_3", "answer_length",
            "eos_rate",
        }  # fmt: skip
        assert all(math.isfinite(value) for value in numbers.values())
    assert result["policies"]["sft"]["kl_per_answer"] == 0.0
    assert json.dumps(result["samples"])
    assert set(result["seconds"]) == {
        "launch", "data", "model", "engine", "training", "generation", "scoring",
        "evaluation", "saving",
    }  # fmt: skip
    assert min(result["seconds"].values()) >= 0
    assert sum(result["seconds"].values()) == pytest.approx(result["wall_seconds"], abs=0.01)
    assert 0 < result["startup_seconds"] < result["wall_seconds"]


def test_same_seed_same_result(run_stage, tiny_lm, reward_model):
    one = run_stage("ppo", PAIRS, tiny_lm, reward_model=reward_model, **PPO)
    two = run_stage("ppo", PAIRS, tiny_lm, reward_model=reward_model, **PPO)
    assert compared(one["metrics"]) == compared(two["metrics"])
