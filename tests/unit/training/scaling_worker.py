"""Run by `test_scaling.py`, alone or under torchrun: trains one model in many ways.

Usage: scaling_worker.py OUTPUT. Rank 0 saves {case name: state dict or error text of each rank}.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from data_sources.examples import SequenceExample, target_tokens
from rlhf_app.commands.worker import leave
from rlhf_app.config.schema import SFTConfig
from rlhf_app.training.accumulate import AddedLoss, NonFiniteError, optimizer_step
from rlhf_app.training.batching import rank_slices
from rlhf_app.training.cross_entropy import cross_entropy
from rlhf_app.training.deepspeed_config import engine_for
from rlhf_app.training.distributed import close, setup
from rlhf_app.training.micro_batches import BatchLimit
from rlhf_app.training.saving import gather_state_dict
from stages.sft.batches import collate

STEPS, LR = 3, 0.5
ROWS = [(5, 2), (9, 4), (3, 1), (12, 9), (7, 3)]  # (length, start of the answer)


def rows() -> list[SequenceExample]:
    generator = torch.Generator().manual_seed(3)
    ids = [torch.randint(0, 31, (n,), generator=generator).tolist() for n, _ in ROWS]
    return [SequenceExample(str(i), ids[i], start, False) for i, (_, start) in enumerate(ROWS)]


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=16,
    )  # fmt: skip
    return LlamaForCausalLM(config)


class Poison(torch.autograd.Function):
    """The same number, with an infinite gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * float("inf")


def train(dist, zero_stage, limit, clip, poison_rank=None, poison="loss"):
    settings = SFTConfig(
        learning_rate=LR, lr_schedule="constant", warmup_ratio=0, max_grad_norm=clip,
        zero_stage=zero_stage,
    )  # fmt: skip
    engine = engine_for(
        model(), settings, dtype=torch.float32, micro_batch_size=limit.rows, total_steps=STEPS,
        dist=dist, make_optimizer=lambda groups: torch.optim.SGD(groups, lr=LR),
    )  # fmt: skip
    data = rows()
    tokens = sum(target_tokens(row, "response") for row in data)

    def loss_fn(batch):
        loss, sums = cross_entropy(engine, batch)
        if poison_rank == dist.rank and poison != "text":
            loss = Poison.apply(loss) if poison == "gradient" else loss * float("nan")
        return loss, sums

    def text_loss(batch):
        loss, sums = cross_entropy(engine, batch)
        return (loss * float("nan") if poison_rank == dist.rank else loss), sums

    slices = rank_slices(
        range(len(data)), [len(r.input_ids) for r in data], limit, dist.rank, dist.world_size
    )
    batches = [
        collate([data[i] for i in part], "response", 0, dist.device, limit=16, filler=data[0])
        for part in slices
    ]
    added = None
    if poison == "text":
        added = AddedLoss("ptx", batches, text_loss, tokens, 0.5)
    losses = []
    error = ""
    try:
        for _ in range(STEPS):
            stats = optimizer_step(engine, batches, loss_fn, tokens, dist, added=added)
            losses.append(stats.loss)
    except NonFiniteError as caught:
        error = str(caught)
    return {
        "state": gather_state_dict(engine.module, dist),
        "losses": losses,
        "errors": dist.gather_objects(error),
    }


def main(output: str) -> None:
    dist = setup()
    results = {}
    try:
        for zero_stage in (0, 2, 3):
            limits = {f"micro{rows}": BatchLimit(rows) for rows in (1, 2, 8)}
            limits |= {f"tokens{tokens}": BatchLimit(1, tokens) for tokens in (4, 21, 60)}
            for name, limit in limits.items():
                results[f"zero{zero_stage} {name}"] = train(dist, zero_stage, limit, 0.0)
            two = BatchLimit(2)
            results[f"zero{zero_stage} clipped"] = train(dist, zero_stage, two, 0.25)
            poison = dist.world_size - 1
            for what in ("loss", "gradient", "text"):
                results[f"zero{zero_stage} poisoned {what}"] = train(
                    dist, zero_stage, two, 0.0, poison, what
                )
            # The same rows once more, as a second objective of half the weight, over other cuts.
            results[f"zero{zero_stage} added"] = train(dist, zero_stage, two, 0.0, None, "text")
        if dist.is_main:
            torch.save(results, Path(output))
    finally:
        close()


if __name__ == "__main__":
    main(sys.argv[1])
    leave(0)
