"""Loading the reward model of stage 2, and how it can read the actor's answers."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, cast

from rlhf_app.models.chat_format import ChatFormat, Kind
from rlhf_app.models.scalar_head import (
    ScalarHeadModel,
    ScoreStats,
    load_scalar_model,
    read_reward_facts,
)
from rlhf_app.models.tokenizer import load_tokenizer, tokenizer_hash

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Stage2Model:
    """A reward model in memory.

    Attributes:
        model: the weights.
        stats: normalisation of its scores, stored with it.
        own_format: its chat format; None where it reads the actor's ids as they are.
        same_ids: the actor's ids mean the same to it, so that a critic can start from it.
    """

    model: ScalarHeadModel
    stats: ScoreStats
    own_format: ChatFormat | None
    same_ids: bool


def load_stage2(
    path: str,
    *,
    chat_format: ChatFormat,
    default_format: Kind,
    actor: Any,
    trust_remote_code: bool,
    loading: dict[str, Any],
) -> Stage2Model:
    """Load a reward model with its statistics, tokenizer and format.

    Args:
        path: directory or Hub id.
        chat_format: the actor's.
        default_format: its own where none is stored with it.
        actor: the actor's causal LM.
        trust_remote_code: run code that the model brings.
        loading: arguments of `load_scalar_model`.

    Raises:
        ConfigError: the path is no usable reward model.
    """
    facts = read_reward_facts(path)
    reward = load_scalar_model(path, **loading)
    tokenizer, actor_tokenizer = load_tokenizer(path, trust_remote_code), chat_format.tokenizer
    # It reads the actor's ids as they are where it knows all of them.
    same_ids = tokenizer_hash(tokenizer) == tokenizer_hash(actor_tokenizer) and (
        _embeddings(reward.backbone) >= _embeddings(actor)
    )
    own_format = ChatFormat(
        tokenizer,
        cast("Kind", facts.chat_format) or default_format,
        extra_stop_ids=facts.eos_token_ids,
    )
    same_format = own_format.kind == chat_format.kind and (
        chat_format.kind != "template" or tokenizer.chat_template == actor_tokenizer.chat_template
    )
    if not (same_ids and same_format):
        log.warning(
            "the reward model was trained with another %s than the actor's: answers are "
            "re-templated and re-encoded for it",
            "chat format" if same_ids else "tokenizer",
        )
    return Stage2Model(
        model=reward,
        stats=facts.stats,
        own_format=None if same_ids and same_format else own_format,
        same_ids=same_ids,
    )


def _embeddings(model: Any) -> int:
    return int(model.get_input_embeddings().num_embeddings)
