"""Run by test_lora_zero.py, alone or under torchrun: adapters over generate/train cycles.

Usage: lora_worker.py CYCLES STAGE...  A stage is a number, or one with "b" for bf16.
Prints "ok STAGE" from rank 0; any failure exits non-zero.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys

import torch
import torch.distributed as dist
from deepspeed_worker import tiny_llama  # beside this script

from rlhf_app.commands.worker import leave
from rlhf_app.config.schema import LoraSettings
from rlhf_app.hybrid_engine import HybridEngine, SamplingParams, initialize
from rlhf_app.hybrid_engine.lora import adapter_off
from rlhf_app.models.lora import attach
from rlhf_app.training.distributed import Dist
from rlhf_app.training.saving import gather_state_dict

NEW_TOKENS = 6
IDS = torch.tensor([[5, 6, 7, 8, 9], [20, 21, 22, 23, 24]])


def start(stage: int, bf16: bool) -> HybridEngine:
    model = tiny_llama()
    # The ranks' global generators differ: adapters must be equal all the same.
    torch.manual_seed(100 + dist.get_rank())
    attach(model, LoraSettings(rank=4), seed=3, base="tiny", setting="lora")
    trained = [p for p in model.parameters() if p.requires_grad]
    engine, _, _, _ = initialize(
        model=model,
        optimizer=torch.optim.AdamW(trained, lr=0.01),
        config={
            "train_micro_batch_size_per_gpu": 2,
            # Nothing is small enough to stay whole: every weight is gathered when used.
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 1.0,
            "bf16": {"enabled": bf16},
            "hybrid_engine": {"enabled": True, "release_inference_cache": True},
        },
    )
    return engine


def whole_state(engine: HybridEngine) -> dict[str, torch.Tensor]:
    here = Dist(dist.get_rank(), dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    return gather_state_dict(engine.module, here)


def base_hash(state: dict[str, torch.Tensor]) -> str:
    """Of every weight that is no adapter's, by its bits."""
    digest = hashlib.sha256()
    for name in sorted(state):
        if "lora_" not in name:
            digest.update(name.encode() + state[name].view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def logits(engine: HybridEngine) -> torch.Tensor:
    with torch.no_grad():
        return engine(input_ids=IDS, use_cache=False).logits.clone()


def check_stage(stage: int, bf16: bool, cycles: int) -> list[list[int]]:
    """Cycles of rollout, reference, training; returns the last tokens."""
    rank = dist.get_rank()
    engine = start(stage, bf16)
    before = whole_state(engine)
    first = logits(engine)
    with torch.no_grad():
        model = tiny_llama()
        for parameter in model.parameters():  # buffers stay as they are, as in DeepSpeed
            parameter.data = parameter.data.to(torch.bfloat16 if bf16 else torch.float32)
        plain = model(IDS).logits
    if stage < 3 and rank == 0:
        assert torch.equal(first, plain), "fresh adapters must change nothing"
    prompts = [[5, 6, 7], [9], [11, 12, 13, 14]][: 3 - rank]
    params = SamplingParams(NEW_TOKENS, greedy=True, suppress_ids=(2,))
    tokens: list[list[int]] = []
    for cycle in range(cycles):
        engine.eval()
        engine.generator.lora_rollout = "fused" if cycle % 2 else "unfused"
        tokens = engine.rollout(prompts, params).tokens
        engine.train()
        policy = logits(engine)
        with adapter_off(engine):
            reference = logits(engine)
        assert torch.equal(reference, first), (stage, cycle)
        assert torch.equal(policy, first) == (cycle == 0), (stage, cycle)
        batch = IDS + rank
        engine.backward(engine(input_ids=batch, labels=batch, use_cache=False).loss)
        engine.step()
    # In fp32 both ways of computing give the tokens of the policy that the last step made.
    engine.eval()
    answers = []
    for mode in ("unfused", "fused"):
        engine.generator.lora_rollout = mode
        answers.append(engine.rollout(prompts, params).tokens)
    assert bf16 or answers[0] == answers[1]
    assert cycles > 10 or answers[0] != tokens
    after = whole_state(engine)
    if rank == 0:
        assert base_hash(after) == base_hash(before), f"ZeRO {stage}: the base changed"
        moved = [k for k in before if "lora_" in k and not torch.equal(before[k], after[k])]
        assert len(moved) == 2 * 14, "every A and B of seven layers twice must have trained"
        for name in before:
            if ".lora_B." in name:
                assert not before[name].any()
    return answers[0]


def main() -> None:
    logging.disable(logging.INFO)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        os.environ["LOCAL_RANK"] = "0"
        store = dist.HashStore()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    seen = []
    for stage in sys.argv[2:]:
        tokens = check_stage(int(stage[0]), stage.endswith("b"), int(sys.argv[1]))
        if not stage.endswith("b"):
            seen.append(tokens)
        dist.barrier()
        if dist.get_rank() == 0:
            print(f"ok {stage}", flush=True)
    assert all(tokens == seen[0] for tokens in seen), "stages disagree"
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    leave(0)
