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
    "data": {"eval_fraction": 0.25},
}


@pytest.fixture
def reward_model(run_stage, tiny_lm) -> str:
    done = run_stage(
        "reward", PAIRS, tiny_lm, learning_rate=1e-3, batch_size=4, micro_batch_size=4,
        data={"eval_fraction": 0.25},
    )  # fmt: skip
    return str(done["model"])


def weights(directory):
    from transformers import AutoModelForCausalLM

    assert not any("lora" in str(path) for path in directory.glob("*.safetensors"))
    return AutoModelForCausalLM.from_pretrained(directory).state_dict()


@pytest.mark.parametrize(
    ("ranks", "actor"),
    [
        (2, {"zero_stage": 3, "learning_rate": 1e-3}),
        (1, {"lora": {"rank": 2, "learning_rate": 1e-2}}),
    ],
)
def test_an_average_that_keeps_nothing_is_the_actor(
    run_stage, tiny_lm, reward_model, ranks, actor
):
    """At decay 0 the average is the weights after the last step: the same artifact, bit for bit."""
    done = run_stage(
        "ppo", PAIRS, tiny_lm, ranks=ranks, reward_model=reward_model, dtype="bf16",
        **PPO | {"actor": actor, "ema_decay": 0.0},
    )  # fmt: skip
    directory = Path(done["model"]).parent
    actor, average = weights(directory / "actor"), weights(directory / "actor_ema")
    assert actor.keys() == average.keys()
    assert all(torch.equal(actor[name], average[name]) for name in actor)
    assert (directory / "actor_ema" / "tokenizer_config.json").is_file()
    for numbers in done["metrics"]:
        if numbers["kind"] == "train":
            assert 0 < numbers["sft_distance"] == pytest.approx(numbers["ema_distance"], rel=1e-6)


def test_text_mixed_in_agrees_on_two_ranks_and_lowers_its_loss(run_stage, tiny_lm, reward_model):
    """The same rows for the same steps, whatever the ranks and micro-batches."""
    settings = PPO | {
        "actor": {"learning_rate": 3e-3}, "ptx_coef": 30.0, "ptx_batch_size": 5, "updates": 3,
    }  # fmt: skip
    alone = run_stage("ppo", PAIRS, tiny_lm, reward_model=reward_model, **settings)
    split = run_stage(
        "ppo", PAIRS, tiny_lm, ranks=2, reward_model=reward_model,
        **settings | {"actor": {"learning_rate": 3e-3, "zero_stage": 3}, "micro_batch_size": 1},
    )  # fmt: skip
    mine, theirs = (
        [r["ptx_loss"] for r in done["metrics"] if r["kind"] == "train"] for done in (alone, split)
    )
    assert theirs == pytest.approx(mine, rel=2e-3)
    assert mine[2] < mine[0] - 0.2
    for one, other in zip(alone["metrics"], split["metrics"], strict=True):
        for name in ("loss", "grad_norm", "reward", "kl_per_answer"):
            if name in one:
                assert other[name] == pytest.approx(one[name], rel=5e-3, abs=5e-4), name
