"""Run by `test_head_scores_zero.py` under torchrun: policy-like steps through a model's head.

Usage: head_scores_worker.py OUTPUT. Rank 0 saves {case name: state dict and findings}.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import transformers as tf

from rlhf_app.commands.worker import leave
from rlhf_app.config.schema import SFTConfig
from rlhf_app.hybrid_engine import initialize
from rlhf_app.training import chunked_logprobs, head_scores
from rlhf_app.training.deepspeed_config import build_config
from rlhf_app.training.distributed import close, setup
from rlhf_app.training.saving import gather_state_dict
from stages.ppo.experience import lay_out
from stages.ppo.logprobs import policy_logprobs, score_policy

STEPS, LR, TEMPERATURE, SUPPRESSED = 2, 0.5, 0.8, (1, 3)
# Of each rank; the last has an answer without tokens, and one row alone.
PROMPTS = [[[5, 6, 7], [8], [9, 10]], [[11, 12]]]
RESPONSES = [[[13, 2], [14, 15, 16, 2], [17]], [[]]]
TOKENS = 7
ENTROPY = 0.7  # weight of a bonus in the loss
MODELS = ("llama", "llama-tied", "opt")
SHAPE = {
    "vocab_size": 31, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 16, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 2,
}  # fmt: skip


def build(name: str) -> tf.PreTrainedModel:
    torch.manual_seed(0)
    if name == "opt":
        config = tf.OPTConfig(**SHAPE, ffn_dim=24, word_embed_proj_dim=16, dropout=0.0)
    else:
        tied = name == "llama-tied"
        config = tf.LlamaConfig(**SHAPE, intermediate_size=24, tie_word_embeddings=tied)
    model = tf.AutoModelForCausalLM.from_config(config)
    if name == "llama-tied":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def weights(count: int) -> torch.Tensor:
    """What each log-prob counts for, like an advantage."""
    return torch.linspace(-1.0, 2.0, count)


def train(dist, name, stage):
    settings = SFTConfig(zero_stage=stage, max_grad_norm=0)
    config = build_config(settings, dtype=torch.float32, micro_batch_size=1)
    if stage == 3:
        # Else DeepSpeed would leave so small a model whole.
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    model = build(name)
    engine = initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=LR), config=config
    )[0]
    engine.train()
    calls = []

    def count(*inputs, **options):
        calls.append(len(inputs[0]))
        return chunked_logprobs.chunked_logprobs(*inputs, **options)

    head_scores.chunked_logprobs = count
    answers = lay_out(PROMPTS[dist.rank], RESPONSES[dist.rank], dist.device)
    options = {"temperature": TEMPERATURE, "suppress_ids": SUPPRESSED}
    ratio_is_1 = True
    for _ in range(STEPS):
        old_BT, _ = score_policy(engine, answers, **options, with_entropy=True)
        new_BT, entropy_BT = policy_logprobs(engine, answers, **options, with_entropy=True)
        ratio_is_1 &= torch.equal(old_BT, new_BT)
        loss = (new_BT * weights(new_BT.shape[1]) + ENTROPY * entropy_BT).sum()
        loss = loss * dist.world_size / TOKENS
        engine.backward(loss, scale_wrt_gas=False)
        engine.step()
    return {
        "state": gather_state_dict(engine.module, dist),
        "ratio_is_1": dist.gather_objects(ratio_is_1),
        "calls": dist.gather_objects(calls),
    }


def main(output: str) -> None:
    dist = setup()
    results = {}
    try:
        for stage in (0, 2, 3):
            for name in MODELS:
                # Several blocks of tokens and of ids; at stage 0 also one.
                for block_bytes in (250, 1 << 20) if stage == 0 else (250,):
                    chunked_logprobs.BLOCK_BYTES["cpu"] = block_bytes
                    results[f"{name} zero{stage} {block_bytes}"] = train(dist, name, stage)
        if dist.is_main:
            torch.save(results, Path(output))
    finally:
        close()


if __name__ == "__main__":
    main(sys.argv[1])
    leave(0)
