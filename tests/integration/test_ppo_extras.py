"""Stage 3 with what is off by default: the averaged actor, pretraining text, stops, warnings."""

from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow

PAIRS = [
    {"prompt": f"{i:02d} ", "chosen": "yes" * (1 + i % 3), "rejected": "no" * (1 + i % 4)}
    for i in range(24)
]
PPO = {
    "critic": {"learning_rate": 1e-3},
    "updates": 2,
    "rollout_batch_size": 8,
    "mini_batches": 2,
    "micro_batch_size": 2,
    "max_prompt_length": 8,
    "max_response_length": 6,
    "eval_prompts": 4,
    "data": {"eval_fraction": 0.25},
}


SCORER = """
def score(prompts, responses):
    return [len(set(text)) / 4 for text in responses]
"""


@pytest.fixture
def rewards(tmp_path) -> list[dict]:
    """A reward function: no reward model has to be trained first."""
    path = tmp_path / "scorer.py"
    path.write_text(SCORER)
    return [{"function": f"{path}:score"}]


def weights(directory):
    from transformers import AutoModelForCausalLM

    assert not any("lora" in str(path) for path in directory.glob("*.safetensors"))
    return AutoModelForCausalLM.from_pretrained(directory).state_dict()


def check_average_is_actor(done):
    """At decay 0 the average is the weights after the last step: the same artifact, bit for bit."""
    directory = Path(done["model"]).parent
    actor, average = weights(directory / "actor"), weights(directory / "actor_ema")
    assert actor.keys() == average.keys()
    assert all(torch.equal(actor[name], average[name]) for name in actor)
    assert (directory / "actor_ema" / "tokenizer_config.json").is_file()
    for numbers in done["metrics"]:
        if numbers["kind"] == "train":
            assert 0 < numbers["sft_distance"] == pytest.approx(numbers["ema_distance"], rel=1e-6)


def test_an_average_of_adapters_is_merged_like_the_actor(run_stage, tiny_lm, rewards):
    actor = {"lora": {"rank": 2, "learning_rate": 1e-2}}
    done = run_stage(
        "ppo", PAIRS, tiny_lm, rewards=rewards, dtype="bf16",
        **PPO | {"actor": actor, "ema_decay": 0.0, "updates": 1},
    )  # fmt: skip
    check_average_is_actor(done)


def test_text_mixed_in_agrees_on_two_ranks_and_lowers_its_loss(run_stage, tiny_lm, rewards):
    """The same rows for the same steps, whatever the ranks and micro-batches."""
    settings = PPO | {
        "actor": {"learning_rate": 3e-3}, "ptx_coef": 30.0, "ptx_batch_size": 5, "ema_decay": 0.0,
    }  # fmt: skip
    alone = run_stage("ppo", PAIRS, tiny_lm, rewards=rewards, **settings)
    split = run_stage(
        "ppo", PAIRS, tiny_lm, ranks=2, rewards=rewards,
        **settings | {"actor": {"learning_rate": 3e-3, "zero_stage": 3}, "micro_batch_size": 1},
    )  # fmt: skip
    check_average_is_actor(split)
    mine, theirs = (
        [r["ptx_loss"] for r in done["metrics"] if r["kind"] == "train"] for done in (alone, split)
    )
    assert theirs == pytest.approx(mine, rel=2e-3)
    assert mine[1] < mine[0] - 0.1
    compared = (
        "loss", "grad_norm", "reward", "kl_per_answer", "unique_answers", "distinct_3",
        "sft_distance",
    )  # fmt: skip
    for one, other in zip(alone["metrics"], split["metrics"], strict=True):
        for name in compared:
            if name in one:
                assert other[name] == pytest.approx(one[name], rel=5e-3, abs=5e-4), name


def test_complaint_peers15_training_ends_at_the_limit_of_kl_with_everything_written(
    run_stage, tiny_lm, rewards
):
    done = run_stage(
        "ppo", PAIRS, tiny_lm, ranks=2, rewards=rewards,
        **PPO | {"updates": 5, "actor": {"learning_rate": 1e-2}, "stop_kl": 1e-6},
    )  # fmt: skip
    result = done["result"]
    # The first rollout is the reference's own: its KL is 0.
    assert result["updates"] == 2
    assert "exceeds ppo.stop_kl 1e-06" in result["stopped"]
    assert [(r["kind"], r["step"]) for r in done["metrics"]] == [
        ("eval", 0), ("train", 1), ("train", 2), ("eval", 2),
    ]  # fmt: skip
    assert (Path(done["model"]).parent / "actor" / "model.safetensors").is_file()
    assert result["warnings"] == []
