"""Log-probs of tokens by a causal LM, computed inside the call of its head.

For the time of a forward the head computes log-probs of the wanted tokens from the hidden states
instead of logits (`chunked_logprobs`). It stays the same module and is called by the model itself,
so hooks see what they always do: ZeRO-3's gather and release its weight around it. That is right
only if the head is an ordinary one and the model returns its result as it is; a softcap or a scale
behind the head, adapters on it or a quantised weight leave it to the model to compute logits.

Shapes: N scored tokens, B rows, L tokens of a row, K of them for which the head is called,
E hidden size, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch._dynamo import OptimizedModule

from rlhf_app.models.surroundings import hooks_of, values_of
from rlhf_app.training.chunked_logprobs import TokenScores, chunked_logprobs

log = logging.getLogger(__name__)

# Of each probed model: what stood around its forward, and why its head cannot be replaced for a
# call; None where it can.
_probed: WeakKeyDictionary[nn.Module, tuple[Hashable, str | None]] = WeakKeyDictionary()
_reported: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
# Largest of the logits that a head returns while the model is probed: a softcap, a scale, a bound
# or a mask would change some of them, a cut their number.
_MARKER = 700.0


def score_tokens(
    model: Any,
    inputs: Mapping[str, Any],
    positions_N: torch.Tensor,
    targets_N: torch.Tensor,
    *,
    temperature: float = 1.0,
    suppress_ids: Sequence[int] = (),
    with_entropy: bool = False,
    with_correct: bool = False,
) -> TokenScores:
    """Log-probs of `targets_N` under the logits at `positions_N`, with gradient where it is on.

    Args:
        model: a causal LM, or an engine around one.
        inputs: of its forward: `input_ids` [B, L] and what else is wanted. With `logits_to_keep`
            no logits before the last so many of each row are computed.
        positions_N: int64, where in [B, L], flattened, the logits of each token are. N may be 0:
            the model still runs, and has gradients of zeros.
        targets_N: int64 token ids.
        temperature: divides the logits.
        suppress_ids: tokens without probability; the rest is renormalised.
        with_entropy: also return the entropy of each distribution. A loss that depends on it must
            depend on the log-probs as well: their way back is the one that hooks are around.
        with_correct: also return whether each target is the most likely token.

    Returns:
        Scores of every token. The first call with a model runs it once more, on two tokens.
    """
    length = inputs["input_ids"].shape[1]
    options: dict[str, Any] = {
        "temperature": temperature,
        "suppress_ids": suppress_ids,
        "with_entropy": with_entropy,
        "with_correct": with_correct,
    }
    head = _replaceable_head(model, inputs)
    if head is None:
        logits_BKV = model(**inputs, use_cache=False).logits
        return scores_of_logits(_pick(logits_BKV, positions_N, length), targets_N, **options)
    found: list[TokenScores] = []

    def forward(hidden_BKE: torch.Tensor) -> torch.Tensor:
        hidden_NE = _pick(hidden_BKE, positions_N, length)
        scores = chunked_logprobs(hidden_NE, head.weight, head.bias, targets_N, **options)
        found.append(scores)
        return scores.logprobs

    with _computing(head, forward):
        output = model(**inputs, use_cache=False)
    # What the model returned, not what the head did: hooks put their backward half around it.
    return found[0]._replace(logprobs=output.logits)


def scores_of_logits(
    logits_NV: torch.Tensor,
    targets_N: torch.Tensor,
    *,
    temperature: float = 1.0,
    suppress_ids: Sequence[int] = (),
    with_entropy: bool = False,
    with_correct: bool = False,
) -> TokenScores:
    """The same from logits that exist anyway; see `score_tokens`."""
    wide = torch.promote_types(logits_NV.dtype, torch.float32)
    scaled_NV = logits_NV.to(wide) / temperature
    if suppress_ids:
        index = torch.tensor(list(suppress_ids), device=scaled_NV.device)
        scaled_NV = scaled_NV.index_fill(-1, index, float("-inf"))
    all_logprobs_NV = scaled_NV.log_softmax(-1)
    logprobs_N = all_logprobs_NV.gather(-1, targets_N.unsqueeze(-1)).squeeze(-1)
    entropy_N = correct_N = None
    if with_entropy:
        # Suppressed tokens add nothing to the entropy, and no NaN to its gradient.
        finite_NV = all_logprobs_NV.masked_fill(all_logprobs_NV == float("-inf"), 0.0)
        entropy_N = -(all_logprobs_NV.exp() * finite_NV).sum(-1)
    if with_correct:
        correct_N = scaled_NV.argmax(-1) == targets_N
    return TokenScores(logprobs_N, entropy_N, correct_N)


def _pick(states_BK: torch.Tensor, positions_N: torch.Tensor, length: int) -> torch.Tensor:
    """Entries of [B, K, ...] at positions in [B, L]; K are the last ones of L."""
    dropped = length - states_BK.shape[1]
    if dropped:
        rows_N = positions_N.div(length, rounding_mode="floor")
        positions_N = positions_N - (rows_N + 1) * dropped
    return states_BK.flatten(0, 1).index_select(0, positions_N)


@contextmanager
def _computing(head: nn.Module, forward: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Let a module compute something else, its hooks included."""
    head.__dict__["forward"] = forward
    try:
        yield
    finally:
        del head.__dict__["forward"]


def _replaceable_head(model: Any, inputs: Mapping[str, Any]) -> nn.Linear | None:
    """The model's head, if computing log-probs in its place gives what the model would."""
    module = getattr(model, "module", model)
    if not isinstance(module, nn.Module):
        return None
    head = _plain_head(module)
    if isinstance(head, str):
        _report(module, head)
        return None
    around = hooks_of(module), hooks_of(head), values_of(getattr(module, "config", None))
    known = _probed.get(module)
    if known is None or known[0] != around:
        known = _probed[module] = around, _probe(model, head, inputs)
        if known[1]:
            _report(module, known[1])
    return None if known[1] else head


def _report(module: nn.Module, obstacle: str) -> None:
    """Once for each model and reason."""
    if _reported.get(module) != obstacle:
        _reported[module] = obstacle
        log.debug(
            "%s: log-probs from whole logits, which takes more memory: %s",
            type(module).__name__,
            obstacle,
        )


def _plain_head(module: nn.Module) -> nn.Linear | str:
    """The head, or what about it is out of the ordinary."""
    if isinstance(module, OptimizedModule):
        return "the model is compiled"
    find = getattr(module, "get_output_embeddings", None)
    head = find() if callable(find) else None
    if head is None:
        return "the model names no head"
    # Subclasses, adapters and quantised layers compute more than a product.
    if type(head) is not nn.Linear:
        return f"its head is a {type(head).__name__}"
    if "forward" in head.__dict__:
        return "its head's forward was replaced"
    if type(head.weight) is not nn.Parameter:
        return f"its head's weight is a {type(head.weight).__name__}"
    return head


def _probe(model: Any, head: nn.Linear, inputs: Mapping[str, Any]) -> str | None:
    """Whether the model returns what its head does; if not, why."""
    few = {
        name: value[:1, :2] if isinstance(value, torch.Tensor) else value
        for name, value in inputs.items()
    }
    if "logits_to_keep" in few:
        few["logits_to_keep"] = 1
    device = few["input_ids"].device
    marker_V = torch.linspace(-_MARKER, _MARKER, head.out_features, device=device)
    devices = [device] if device.type == "cuda" else []

    def marked(hidden_BKE: torch.Tensor) -> torch.Tensor:
        return marker_V.expand(*hidden_BKE.shape[:-1], -1).contiguous()

    try:
        # Dropout must not see that there was a forward more.
        with torch.no_grad(), torch.random.fork_rng(devices), _computing(head, marked):
            returned_BKV = model(**few, use_cache=False).logits
    except torch.OutOfMemoryError:
        raise  # says nothing about the model, and logits would need more still
    except Exception as error:  # the model indexes its logits, for instance
        return f"it needs logits after its head ({type(error).__name__}: {error})"
    returned_V = returned_BKV.flatten(0, -2)[-1].to(marker_V.dtype)
    if returned_V.shape != marker_V.shape or not torch.equal(returned_V, marker_V):
        return "it changes logits after its head"
    return None
