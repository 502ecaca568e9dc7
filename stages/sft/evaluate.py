"""Held-out perplexity, and a few answers to look at."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from data_sources.examples import SequenceExample
from rlhf_app.config.schema import HybridEngineSettings
from rlhf_app.hybrid_engine import Generator, SamplingParams, weights_of
from rlhf_app.models.chat_format import ChatFormat
from rlhf_app.training.accumulate import check_evaluation
from rlhf_app.training.batching import rank_slices
from rlhf_app.training.cross_entropy import TokenBatch
from rlhf_app.training.distributed import Dist
from rlhf_app.training.error_phase import within
from rlhf_app.training.micro_batches import BatchLimit

LossOfBatch = Callable[[TokenBatch], tuple[torch.Tensor, dict[str, torch.Tensor]]]


@dataclass(frozen=True)
class Evaluation:
    """Sums over a whole data set, the same on every rank.

    Attributes:
        nll: negative log-likelihood in nats, summed over tokens.
        correct: tokens whose target was the most likely one.
        tokens: number of tokens.
    """

    nll: float
    correct: float
    tokens: float

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nll / self.tokens

    @property
    def perplexity(self) -> float:
        """exp of the mean over all tokens (not of a mean of batch means)."""
        return math.exp(min(self.loss, 700.0))


@within("evaluation")
def evaluate(
    engine: Any,
    lengths: Sequence[int],
    batch_of: Callable[[list[int]], TokenBatch],
    loss_of: LossOfBatch,
    limit: BatchLimit,
    dist: Dist,
) -> Evaluation:
    """Measures the loss on held-out rows, without updating anything.

    Args:
        engine: the DeepSpeed engine; put into eval mode and back.
        lengths: tokens of each row, the same on every rank.
        batch_of: row indices -> micro-batch.
        loss_of: the training loss.
        limit: of one forward.
        dist: this process's place.

    Raises:
        NonFiniteError: on every rank, when the loss of any rank is not finite.
    """
    slices = rank_slices(range(len(lengths)), lengths, limit, dist.rank, dist.world_size)
    totals = torch.zeros(2, dtype=torch.float64, device=dist.device)
    tokens = 0
    engine.eval()
    with torch.no_grad():
        for rows in slices:
            batch = batch_of(rows)
            loss, metrics = loss_of(batch)
            tokens += int(batch.mask_BT.sum())  # on the host
            totals += torch.stack([loss.double(), metrics["correct"].double()])
    engine.train()
    result = Evaluation(*dist.sum([*totals.tolist(), tokens]))
    check_evaluation({"loss": result.nll})
    return result


def sample_answers(
    engine: Any,
    examples: Sequence[SequenceExample],
    fmt: ChatFormat,
    hybrid: HybridEngineSettings,
    max_new_tokens: int,
) -> list[dict[str, str]]:
    """Answers held-out prompts greedily with the weights in the engine.

    Under ZeRO-3 every rank must call, since weights are gathered from all of them; else any
    rank may call alone.

    Args:
        engine: the trained engine.
        examples: whose prompts to answer.
        fmt: stop tokens and decoding.
        hybrid: settings of the rollout.
        max_new_tokens: most tokens of one answer.

    Returns:
        One {"prompt", "response"} per example, as text.
    """
    prompts = [example.input_ids[: example.response_start] for example in examples]
    params = SamplingParams(max_new_tokens=max_new_tokens, greedy=True, stop_ids=fmt.stop_ids)
    # One rank alone cannot share its rollout, and equal prompts on every rank need not.
    hybrid = hybrid.model_copy(update={"inference_tp_size": 1})
    engine.eval()
    try:
        generator = Generator(engine.module, hybrid, weights_of(engine, hybrid))
        rollout = generator.rollout(prompts, params)
    finally:
        engine.train()
    return [
        {"prompt": fmt.decode(prompt), "response": fmt.decode(answer)}
        for prompt, answer in zip(prompts, rollout.tokens, strict=True)
    ]
