"""How different the answers of a rollout are, over all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rlhf_app.training.distributed import Dist

_N = 3
# Ids are below 2^21 in every vocabulary there is: three fit into 63 bits.
_ID_BITS = 21


def rollout_diversity(answers: Sequence[Sequence[int]], dist: Dist) -> dict[str, float]:
    """Two shares of what is there only once counted, the same on every rank.

    Args:
        answers: token ids of this rank's answers.
        dist: process group.

    Returns:
        `unique_answers`: different answers / answers; `distinct_3`: different token trigrams /
        trigrams (Li et al. 2016, arXiv:1510.03055), of all answers together.
    """
    grams = _trigrams(answers)
    own = ({tuple(answer) for answer in answers}, len(answers), grams.unique(), len(grams))
    texts, counts, distinct, totals = zip(*dist.gather_objects(own), strict=True)
    return {
        "unique_answers": len(set().union(*texts)) / max(sum(counts), 1),
        "distinct_3": len(torch.cat(distinct).unique()) / max(sum(totals), 1),
    }


def _trigrams(answers: Sequence[Sequence[int]]) -> torch.Tensor:
    """Each token trigram as one number, int64 (trigrams)."""
    ids = torch.tensor([token for answer in answers for token in answer], dtype=torch.int64)
    lengths = torch.tensor([len(answer) for answer in answers], dtype=torch.int64)
    if len(ids) < _N:
        return ids[:0]
    owner = torch.arange(len(answers)).repeat_interleave(lengths)
    first, second, third = ids[:-2], ids[1:-1], ids[2:]
    whole = owner[:-2] == owner[2:]
    return ((first << 2 * _ID_BITS) | (second << _ID_BITS) | third)[whole]
