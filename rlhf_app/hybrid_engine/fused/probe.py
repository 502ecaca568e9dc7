"""Does a fused decoder compute what the module's own forward computes?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from rlhf_app.hybrid_engine.attention import Decode, Prefill, Step
from rlhf_app.hybrid_engine.fused.decoder import FusedDecoder
from rlhf_app.hybrid_engine.kv_workspace import KVWorkspace, LayerShape
from rlhf_app.hybrid_engine.rounding import disagreement, tolerance

_Forward = Callable[[torch.Tensor, torch.Tensor, Step], torch.Tensor]
_StepOf = Callable[[KVWorkspace, torch.Tensor, torch.Tensor, int], Step]
# Of two rows of unlike lengths; then two tokens more of each, one by one.
_PROMPT_TOKENS = 6
_DECODED = 2


class Forwards(Protocol):
    """An `InferenceModel` whose forwards are the module's own."""

    @property
    def device(self) -> torch.device: ...  # noqa: D102
    @property
    def dtype(self) -> torch.dtype: ...  # noqa: D102
    @property
    def input_vocabulary(self) -> int: ...  # noqa: D102
    def prefill(  # noqa: D102
        self, ids_BP: torch.Tensor, lengths_B: torch.Tensor, step: Step
    ) -> torch.Tensor: ...
    def decode(  # noqa: D102
        self, tokens_B: torch.Tensor, positions_B: torch.Tensor, step: Step
    ) -> torch.Tensor: ...


def disagrees(model: Forwards, decoder: FusedDecoder) -> str | None:
    """Run a prompt and a few tokens both ways, in the session in which both would run.

    Args:
        model: runs the module's own forward.
        decoder: of the same module.

    Returns:
        None where the logits are equal but for rounding; else by how much they differ.
    """
    device = model.device
    columns = range(_PROMPT_TOKENS + _DECODED)
    ids = [[(5 + 7 * i + 3 * row) % model.input_vocabulary for i in columns] for row in range(2)]
    ids_BP = torch.tensor(ids, device=device)
    lengths_B = torch.tensor([_PROMPT_TOKENS, _PROMPT_TOKENS - 1], device=device)

    def fused_prefill(ids_BP: torch.Tensor, lengths_B: torch.Tensor, step: Step) -> torch.Tensor:
        positions_BP = torch.arange(ids_BP.shape[1], device=device).expand(ids_BP.shape)
        return decoder(ids_BP, positions_BP, step, lengths_B - 1)

    def fused_decode(tokens_B: torch.Tensor, at_B: torch.Tensor, step: Step) -> torch.Tensor:
        return decoder(tokens_B[:, None], at_B[:, None], step)

    def plain_step(
        workspace: KVWorkspace, slots_B: torch.Tensor, lengths_B: torch.Tensor, longest: int
    ) -> Step:
        return Decode(workspace, lengths_B, longest, equal=False)

    shapes = [LayerShape(x.kv_heads, x.head_dim, x.head_dim) for x in decoder.plan.layers]

    def logits(prefill: _Forward, decode: _Forward, step_of: _StepOf) -> torch.Tensor:
        """[1 + decoded, B, V] of one way."""
        workspace = KVWorkspace(shapes, model.dtype, device)
        workspace.borrow(*ids_BP.shape)
        rows = torch.arange(len(ids_BP), device=device)
        prompts = Prefill(workspace, slice(0, len(ids_BP)))
        found = [prefill(ids_BP[:, :_PROMPT_TOKENS], lengths_B, prompts)]
        for number in range(_DECODED):
            at_B = lengths_B + number
            step = step_of(workspace, rows, at_B, _PROMPT_TOKENS + number)
            found.append(decode(ids_BP[rows, at_B], at_B, step))
        return torch.stack(found)

    want = logits(model.prefill, model.decode, plain_step)
    have = logits(fused_prefill, fused_decode, decoder.decode_step)
    worst = disagreement(have, want, tolerance(model.dtype))
    return None if worst is None else f"its fused logits differ by {worst:.2g} of their size"
