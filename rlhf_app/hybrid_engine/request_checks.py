"""Checks of what a rollout is asked for, before anything runs.

They look at every token: quick enough to be noticed by nobody (2 * 10**5 tokens in some ms).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

import numpy as np
import torch

from rlhf_app.errors import ConfigError
from rlhf_app.hybrid_engine.sampling import SamplingParams

_SHOWN = 60


def check_prompts(prompts: Any, vocabulary: int) -> None:
    """Refuse what is not a list of lists of token ids.

    Args:
        prompts: the caller's; each one a list, a tuple, or a 1-D array or tensor. No prompt at
            all is for the caller to judge.
        vocabulary: ids lie in 0..vocabulary - 1.

    Raises:
        ConfigError: naming the first prompt that is wrong.
    """
    if not _is_sequence(prompts):
        raise ConfigError(
            f"prompts is a {type(prompts).__name__}: give a list with one list of token ids per "
            "prompt (of a tensor: its rows without padding, as lists)"
        )
    rows = [_ids(index, prompt) for index, prompt in enumerate(prompts)]
    ids = np.frombuffer(b"".join(rows), dtype=np.int64)
    if not len(ids) or (ids.min() >= 0 and ids.max() < vocabulary):
        return
    for index, row in enumerate(rows):
        for token in row:
            if not 0 <= token < vocabulary:
                raise ConfigError(
                    f"prompt {index} holds id {token}: the model knows 0 to {vocabulary - 1}"
                )


def check_suppressed(params: SamplingParams, vocabulary: int) -> None:
    """Refuse to suppress a token that the model does not have.

    Args:
        params: of a rollout.
        vocabulary: number of logits.

    Raises:
        ConfigError: an id is beyond the vocabulary.
    """
    highest = max(params.suppress_ids, default=0)
    if highest >= vocabulary:
        raise ConfigError(
            f"suppress_ids holds {highest}: the model has logits for 0 to {vocabulary - 1}"
        )


def check_limits(limits: Any, prompts: int, new_tokens: int) -> list[int]:
    """The most tokens of each answer, or a refusal of what is no list of them.

    Args:
        limits: the caller's, or None.
        prompts: how many there are.
        new_tokens: most tokens of any answer.

    Raises:
        ConfigError: naming the first limit that is wrong.
    """
    if limits is None:
        return [new_tokens] * prompts
    if _is_row(limits):
        limits = limits.tolist()
    if not _is_sequence(limits):
        raise ConfigError(
            f"limits is a {type(limits).__name__}: give a list with one whole number per prompt"
        )
    if len(limits) != prompts:
        raise ConfigError(f"rollout: {len(limits)} limits for {prompts} prompts")
    for index, limit in enumerate(limits):
        whole = isinstance(limit, Integral) and not isinstance(limit, bool)
        if not whole or not 1 <= limit <= new_tokens:
            raise ConfigError(
                f"limit {index} is {limit!r}: give a whole number from 1 to max_new_tokens "
                f"({new_tokens})"
            )
    return [int(limit) for limit in limits]


def check_length(
    prompt: int,
    new_tokens: int,
    limits: Mapping[str, int | None],
    called: str = "max_new_tokens",
) -> None:
    """Refuse a row that would be too long.

    Args:
        prompt: tokens of the longest one.
        new_tokens: most tokens of its answer.
        limits: most tokens of a row, by what sets them; None is no limit.
        called: what the caller knows `new_tokens` as.

    Raises:
        ConfigError: naming the limit.
    """
    for name, limit in limits.items():
        if limit is not None and prompt + new_tokens > limit:
            raise ConfigError(
                f"a prompt of {prompt} tokens and {called} {new_tokens} "
                f"exceed {name} ({limit}): shorten one of them"
            )


def _is_sequence(value: object) -> bool:
    # The first for speed, and a list of ids is one; text is a sequence, but not of ids.
    return isinstance(value, list) or (
        isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)
    )


def _is_row(value: object) -> bool:
    return isinstance(value, torch.Tensor | np.ndarray) and value.ndim == 1


def _ids(index: int, prompt: Any) -> array[int]:
    """One prompt's ids, int64."""
    one_row = _is_row(prompt)
    if not one_row and not _is_sequence(prompt):
        raise _no_ids(index, prompt)
    if not len(prompt):
        raise ConfigError(f"prompt {index} is empty: give at least one token")
    ids: Iterable[int] = prompt.tolist() if one_row else prompt
    try:
        return array("q", ids)
    except (TypeError, OverflowError):
        raise _no_ids(index, prompt) from None


def _no_ids(index: int, prompt: object) -> ConfigError:
    shown = " ".join(repr(prompt).split())
    if len(shown) > _SHOWN:
        shown = shown[: _SHOWN - 3] + "..."
    return ConfigError(f"prompt {index} is {shown}: give a list of token ids (whole numbers)")
