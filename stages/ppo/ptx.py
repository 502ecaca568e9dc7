"""Pretraining text beside the policy loss: PPO-ptx (Ouyang et al. 2022, arXiv:2203.02155, eq. 2).

L = L_policy + ptx_coef * CE, both means per token, CE over the text of the optimizer step on all
ranks. It is one objective with one gradient and one step: DeepSpeed-Chat's second step for the
text, with Adam's moments of the first, is another algorithm.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from data_sources.encode import encode
from data_sources.encoded import Examples
from data_sources.records import Record
from data_sources.selection import Selected
from data_sources.stage_data import load_text
from rlhf_app.config.schema import RunConfig
from rlhf_app.errors import ConfigError
from rlhf_app.models.chat_format import ChatFormat
from rlhf_app.models.limits import check_vocabulary, length_limit
from rlhf_app.models.load import model_max_length
from rlhf_app.models.tokenizer import padding_id, tokenizer_hash
from rlhf_app.training.accumulate import AddedLoss
from rlhf_app.training.batching import epoch_order, rank_slices
from rlhf_app.training.cross_entropy import TokenBatch, cross_entropy, token_batch
from rlhf_app.training.distributed import Dist
from rlhf_app.training.micro_batches import BatchLimit
from stages.ppo.text_rows import TextEncoding, TextRow

# Not the order in which SFT saw its rows.
_SEED = 40_487


class TextMix:
    """The text of every optimizer step of the actor, by the step's number alone.

    Args:
        engine: the actor's.
        rows: of text, not empty.
        coef: weight of the cross-entropy.
        batch_size: rows of a step, over all ranks.
        limit: of a micro-batch.
        seed: of the order, which is another one each epoch.
        pad_id: fills up rows.
        positions: the model's.
        dist: process group.
    """

    def __init__(
        self,
        engine: Any,
        rows: Examples[TextRow],
        *,
        coef: float,
        batch_size: int,
        limit: BatchLimit,
        seed: int,
        pad_id: int,
        positions: int,
        dist: Dist,
    ) -> None:
        assert rows
        self._engine = engine
        self._rows = rows
        self._coef = coef
        self._batch_size = batch_size
        self._limit = limit
        self._seed = seed
        self._pad_id = pad_id
        self._positions = positions
        self._dist = dist
        self._step = 0
        self._order = (-1, array("q"))

    def next(self) -> AddedLoss[TokenBatch]:
        """The objective over the next step's text: this rank's part of it."""
        first = self._step * self._batch_size
        batch = self._numbers(first)
        self._step += 1
        parts = rank_slices(
            batch, self._rows.lengths, self._limit, self._dist.rank, self._dist.world_size
        )
        return AddedLoss(
            name="ptx",
            micro_batches=[self._micro_batch(part) for part in parts],
            loss_fn=self._loss,
            # Every rank knows the whole step.
            total_weight=sum(self._rows.targets(row) for row in batch),
            coef=self._coef,
        )

    def state_dict(self) -> dict[str, int]:
        """Where the next step's text begins."""
        return {"step": self._step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from what `state_dict` returned."""
        self._step = state["step"]

    def _numbers(self, first: int) -> list[int]:
        """Rows at places `first` onwards of epoch after epoch."""
        count = len(self._rows)
        last = first + self._batch_size
        rows: list[int] = []
        for epoch in range(first // count, -(-last // count)):
            if epoch != self._order[0]:
                self._order = (epoch, epoch_order(count, self._seed ^ _SEED, epoch))
            start = epoch * count
            rows += self._order[1][max(first - start, 0) : last - start]
        return rows

    def _micro_batch(self, part: Sequence[int]) -> TokenBatch:
        rows = [self._rows[row] for row in part]
        return token_batch(
            [ids for ids, _ in rows],
            [spans for _, spans in rows],
            self._pad_id,
            self._dist.device,
            limit=self._positions,
            filler=self._rows[0][0],
        )

    def _loss(self, batch: TokenBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return cross_entropy(self._engine, batch)


def load_text_mix(
    config: RunConfig, engine: Any, tokenizer: Any, fmt: ChatFormat, path: str, dist: Dist
) -> tuple[TextMix | None, dict[str, int]]:
    """Returns (the text that the settings ask for or None, reasons of rows lost or cut).

    Args:
        config: the whole run.
        engine: the actor's.
        tokenizer: the actor's.
        fmt: its chat format.
        path: of the actor, for errors.
        dist: process group.

    Raises:
        ConfigError: there is no usable text.
    """
    ppo = config.ppo
    if ppo.ptx_coef == 0:
        return None, {}
    try:
        records, reasons = load_text(config)
    except ConfigError as error:
        raise ConfigError(f"ppo.ptx_coef = {ppo.ptx_coef:g}: {error}") from None
    positions = model_max_length(engine.module.config)
    longest = length_limit(config.data.max_length, positions, path)
    encoding = TextEncoding(
        fmt,
        tokenizer_hash(tokenizer),
        longest,
        config.data.truncation.sft,
        config.data.sft_loss_on,
        tokenizer.eos_token_id,
    )
    rows = encode(answered_first(records), encoding, config.data)
    reasons += rows.reasons
    if not rows:
        raise ConfigError(
            f"ppo.ptx_coef = {ppo.ptx_coef:g}: no row of text is usable ({dict(reasons)}): give "
            f"ppo.ptx_data, or raise data.max_length ({longest})"
        )
    check_vocabulary(engine.module, rows.highest_id, path)
    mix = TextMix(
        engine,
        rows,
        coef=ppo.ptx_coef,
        batch_size=ppo.ptx_batch_size or ppo.rollout_batch_size // ppo.mini_batches,
        limit=BatchLimit(ppo.micro_batch_size, ppo.micro_batch_tokens),
        seed=config.seed,
        pad_id=padding_id(tokenizer),
        positions=positions,
        dist=dist,
    )
    return mix, dict(reasons)


def answered_first(records: Sequence[Record]) -> Sequence[Record]:
    """Returns records with an answer before those of plain text."""
    if isinstance(records, Selected):
        return records.take(np.argsort(~records.has_answer_N, kind="stable"))
    return sorted(records, key=lambda record: record.sft_target is None)
