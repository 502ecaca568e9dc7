"""Greedy answers compared with Hugging Face's own generate, ties apart.

Shapes: R rows, P prompt tokens, T answer tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import GenerationConfig

from rlhf_app.hybrid_engine.inference_model import InferenceModel
from rlhf_app.report.verification import Greedy

# Two logits closer than this are a tie: absolute in fp32, a share of the larger one in half
# precision (a few units in the last place).
_TIE = 1e-4
_TIE_SHARE = {torch.float16: 4 * 2.0**-11, torch.bfloat16: 4 * 2.0**-8}


def compare_with_hf(
    model: InferenceModel, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> Greedy:
    """Generate the same answers with transformers and look at the first differences.

    Args:
        model: the model; whole weights are made available for the time of the call, which under
            ZeRO-3 is one of all ranks.
        prompts: token ids, none empty.
        answers: greedy answers of one length, without a stop id.

    Returns:
        Equal, or how the answers differ: a row may part from transformers where the two largest
        logits are a tie, and only there.
    """
    with model.evaluation(whole=True):
        wanted = _hf_greedy(model, prompts, len(answers[0]))
        gaps: list[tuple[float, str]] = []
        for row, (have, want) in enumerate(zip(answers, wanted, strict=True)):
            pairs = zip(have, want, strict=True)
            first = next((t for t, (a, b) in enumerate(pairs) if a != b), None)
            if first is not None:
                gap, bound = _tie(model, [*prompts[row], *want[:first]])
                text = (
                    f"answer {row}, token {first}: {have[first]} for {want[first]}, whose logits "
                    f"are {gap:.2g} apart (a tie is {bound:.2g})"
                )
                gaps.append((gap / bound, text))
    tokens = sum(map(len, answers))
    if not gaps:
        return Greedy(len(answers), tokens)
    worst, text = max(gaps)
    return Greedy(len(answers), tokens, len(gaps), text, worst <= 1.0)


def _hf_greedy(
    model: InferenceModel, prompts: Sequence[Sequence[int]], new_tokens: int
) -> list[list[int]]:
    """transformers' answers, from left-padded rows, or one length at a time where the forward
    cannot be told positions."""
    groups: dict[int, list[int]] = {}
    for row, prompt in enumerate(prompts):
        groups.setdefault(0 if model.takes_positions else len(prompt), []).append(row)
    found: list[list[int]] = [[] for _ in prompts]
    kept, model.model.generation_config = model.model.generation_config, GenerationConfig()
    try:
        for rows in groups.values():
            longest = max(len(prompts[row]) for row in rows)
            pads = [longest - len(prompts[row]) for row in rows]
            ids = [[*[0] * pad, *prompts[row]] for pad, row in zip(pads, rows, strict=True)]
            mask = [[0] * pad + [1] * (longest - pad) for pad in pads]
            out = model.model.generate(
                torch.tensor(ids, device=model.device),
                attention_mask=torch.tensor(mask, device=model.device),
                generation_config=GenerationConfig(
                    max_new_tokens=new_tokens, do_sample=False, pad_token_id=0
                ),
            )
            for row, answer in zip(rows, out[:, longest:].tolist(), strict=True):
                found[row] = answer
    finally:
        model.model.generation_config = kept
    return found


def _tie(model: InferenceModel, ids: Sequence[int]) -> tuple[float, float]:
    """Distance of the two largest logits after these tokens, and what counts as a tie."""
    inputs = torch.tensor([list(ids)], device=model.device)
    logits_V = model.model(input_ids=inputs, use_cache=False).logits[0, -1].float()
    first, second = logits_V.topk(2).values.tolist()
    return first - second, max(_TIE, _TIE_SHARE.get(model.dtype, 0.0) * abs(first))
