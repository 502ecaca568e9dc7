"""Run by `test_ema_ranks.py` under torchrun: averages kept while a small model trains.

Usage: ema_worker.py OUTPUT. Rank 0 saves {case name: what was averaged, and a second opinion}:
fp32 weights are put together on every rank at each step and averaged in fp64.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf_app.commands.worker import leave
from rlhf_app.config.schema import LoraSettings, SFTConfig
from rlhf_app.models.lora import attach
from rlhf_app.training import deepspeed_config
from rlhf_app.training.accumulate import optimizer_step
from rlhf_app.training.deepspeed_config import engine_for
from rlhf_app.training.deepspeed_module import load_deepspeed
from rlhf_app.training.distributed import close, setup
from rlhf_app.training.ema import WeightAverage
from rlhf_app.training.saving import gather_state_dict

STEPS, DECAY = 4, 0.7


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=16,
        tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def whole(engine) -> dict[str, torch.Tensor]:
    """The trained weights in fp64, by name, on every rank."""
    read = load_deepspeed().utils.safe_get_full_fp32_param
    found = {}
    for name, tensor in engine.module.named_parameters():
        if tensor.requires_grad:
            value = read(tensor)
            found[name] = (tensor if value is None else value).detach().double().clone()
    return found


def relative(ours, start) -> float:
    apart = sum((ours[name] - start[name]).square().sum() for name in start)
    return float((apart / sum(value.square().sum() for value in start.values())).sqrt())


def train(dist, stage, dtype, lora):
    settings = SFTConfig(
        learning_rate=0.01, lr_schedule="constant", warmup_ratio=0, zero_stage=stage,
        lora=LoraSettings(rank=2, learning_rate=0.01) if lora else LoraSettings(),
    )  # fmt: skip
    net = model().to(dtype)
    if lora:
        attach(net, settings.lora, seed=5, base="here", setting="sft.lora")
    engine = engine_for(
        net, settings, dtype=dtype, micro_batch_size=1, total_steps=STEPS, dist=dist
    )
    average = WeightAverage(engine, DECAY, dist)
    start = whole(engine)
    second = dict(start)
    for step in range(STEPS):
        ids = torch.randint(0, 31, (2, 8), generator=torch.Generator().manual_seed(step))
        row = ids[dist.rank : dist.rank + 1]
        optimizer_step(
            engine, [row], lambda x: (engine(input_ids=x, labels=x).loss, {}), 2.0, dist
        )  # fmt: skip
        average.update()
        now = whole(engine)
        second = {name: DECAY * second[name] + (1 - DECAY) * now[name] for name in now}
    own = gather_state_dict(engine.module, dist)
    distances = average.distances()
    averaged = average.weights()
    after = gather_state_dict(engine.module, dist)
    masters_same = all(torch.equal(value, now[name]) for name, value in whole(engine).items())
    shares = dist.gather_objects(sum(t.numel() for t in average.state_dict()["average"]))
    return {
        "second": {name: value.to(dtype) for name, value in second.items()},
        "averaged": averaged,
        "frozen": {n: v for n, v in own.items() if n not in second},
        "undisturbed": masters_same and all(torch.equal(own[name], after[name]) for name in own),
        "distances": distances,
        "expected": {
            "ema_distance": relative(second, start), "sft_distance": relative(now, start)
        },
        "shares": shares,
        "trained": sum(value.numel() for value in second.values()),
    }  # fmt: skip


def main(output: str) -> None:
    build = deepspeed_config.build_config

    def build_split(*args, **settings):
        """Else DeepSpeed would leave so small a model whole under ZeRO-3."""
        config = build(*args, **settings)
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        return config

    deepspeed_config.build_config = build_split
    dist = setup()
    try:
        results = {
            f"zero{stage} {str(dtype)[6:]}{' lora' * lora}": train(dist, stage, dtype, lora)
            for stage in (0, 2, 3)
            for dtype in (torch.float32, torch.bfloat16)
            for lora in (False, True)
        }
        if dist.is_main:
            torch.save(results, Path(output))
    finally:
        close()


if __name__ == "__main__":
    main(sys.argv[1])
    leave(0)
