"""Run by test_engine.py under torchrun: one rank of a HybridEngine on DeepSpeed.

Usage: deepspeed_worker.py STAGE...  Prints "ok STAGE" from rank 0; any failure exits non-zero.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
import transformers as tf

from rlhf_app.commands.worker import leave
from rlhf_app.hybrid_engine import HybridEngine, SamplingParams, initialize

NEW_TOKENS = 12


def tiny_llama() -> tf.PreTrainedModel:
    torch.manual_seed(0)
    config = tf.LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        initializer_range=0.25, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return tf.LlamaForCausalLM(config)


def native_greedy(model: tf.PreTrainedModel, prompts: list[list[int]]) -> list[list[int]]:
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS,
        do_sample=False, suppress_tokens=[2],
    )  # fmt: skip
    return out[:, longest:].tolist()


def check_stage(stage: int) -> None:
    rank = dist.get_rank()
    model = tiny_llama()
    engine, optimizer, _, _ = initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 1.0,
            "hybrid_engine": {"enabled": True, "release_inference_cache": True},
        },
    )
    assert isinstance(engine, HybridEngine)
    assert type(engine.deepspeed_engine).__name__ == "DeepSpeedEngine"
    assert optimizer is engine.optimizer
    # Ranks differ in batch and in length: nothing may wait for the other rank.
    prompts = [[5 + rank, 6, 7], [9], [11, 12, 13, 14]][: 3 - rank]
    params = SamplingParams(NEW_TOKENS, greedy=True, suppress_ids=(2,))
    addresses = [p.data_ptr() for p in model.parameters()]
    seen = []
    batch = torch.tensor([[5, 6, 7, 8], [20 + rank, 21, 22, 23]])
    for _ in range(3):
        engine.eval()
        assert engine.eval() is engine
        assert not model.training
        got = engine.rollout(prompts, params).tokens
        engine.rollout(prompts[:1], SamplingParams(1 + 5 * rank))
        if stage < 3:
            assert got == native_greedy(model, prompts)
        ids = torch.tensor([prompts[0]])
        out = engine.generate(ids, max_new_tokens=NEW_TOKENS, suppress_tokens=[2])
        assert out[0, 3:].tolist() == got[0]
        seen.append(got)
        assert not model.training
        engine.train()
        assert engine.train() is engine
        assert model.training
        assert engine.generator.workspace_bytes == 0
        loss = engine(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        engine.step()
    assert seen[0] != seen[1] != seen[2], "tokens did not follow the updates"
    if stage < 3:
        assert [p.data_ptr() for p in model.parameters()] == addresses
        first = next(model.parameters()).detach().clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, next(model.parameters())), "ranks drifted apart"
    assert engine.global_steps == 3
    breakdown = engine.breakdown
    assert breakdown.generate > 0 < breakdown.training
    assert (breakdown.gather > 0) is (stage == 3)
    assert breakdown.gather + breakdown.generate + breakdown.training <= breakdown.total
    assert breakdown.samples == len(prompts) + 2  # rollout, its second call, and generate
    assert breakdown.tokens_per_second > breakdown.samples_per_second > 0


def main() -> None:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    dist.init_process_group("gloo")
    for stage in map(int, sys.argv[1:]):
        check_stage(stage)
        dist.barrier()
        if dist.get_rank() == 0:
            print(f"ok {stage}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    leave(0)
