"""Forwards of a planned decoder over the parameters of the module that is trained.

Shapes: B rows, P tokens of a row, N = B x P, E features, H query heads, K kv heads, D head size,
V vocabulary.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from rlhf_app.hybrid_engine.attention import AttentionCall, Decode, Step
from rlhf_app.hybrid_engine.fused.ops import Delta, Ops
from rlhf_app.hybrid_engine.fused.plan import DecoderPlan, LayerPlan
from rlhf_app.hybrid_engine.kv_workspace import KVWorkspace

# What the layers of every planned family pass to attention beside these: nothing.
_EXTRAS = {"dropout": 0.0}
Rotation = tuple[torch.Tensor, torch.Tensor]


class FusedDecoder:
    """Ids and positions in, logits out, as the module's own forward.

    Attributes:
        plan: what is computed.
        ops: how.

    Args:
        plan: see `plan`.
        ops: see `ops`.
    """

    def __init__(self, plan: DecoderPlan, ops: Ops) -> None:
        self.plan = plan
        self.ops = ops

    def __call__(
        self,
        ids_BP: torch.Tensor,
        positions_BP: torch.Tensor,
        step: Step,
        last_B: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run prompts, or one token per row.

        Args:
            ids_BP: [B, P] int64.
            positions_BP: [B, P] int64 position of each token in its row.
            step: serves attention.
            last_B: [B] int64, the token of each row whose logits count; None where P is 1.

        Returns:
            [B, V] logits.
        """
        batch, length = ids_BP.shape
        x = self._embedded(ids_BP, positions_BP)
        rotation: Rotation | None = None
        if self.plan.rotary is not None:
            rotation = self.plan.rotary(x, positions_BP)
        x_NE = x.reshape(batch * length, -1)
        delta: Delta | None = None
        last_layer = self.plan.layers[-1]
        for layer in self.plan.layers:
            x_NE, y_NE = self.ops.residual_norm(x_NE, delta, layer.input_norm)
            out_BPF = self._attention(y_NE, (batch, length), layer, rotation, step)
            if layer is last_layer and last_B is not None:
                # From here on tokens do not meet: only those that are asked for go on.
                rows = torch.arange(batch, device=ids_BP.device)
                out_BPF = out_BPF[rows, last_B]
                x_NE = x_NE.view(batch, length, -1)[rows, last_B]
            delta = self.ops.residual_linear(out_BPF.reshape(len(x_NE), -1), layer.output)
            x_NE, y_NE = self.ops.residual_norm(x_NE, delta, layer.mlp_norm)
            delta = self.ops.mlp(y_NE, layer)
        _, y_NE = self.ops.residual_norm(x_NE, delta, self.plan.final_norm)
        return self.ops.linear(y_NE, self.plan.head)

    def decode_step(
        self, workspace: KVWorkspace, slots_B: torch.Tensor, lengths_B: torch.Tensor, longest: int
    ) -> Step:
        """What serves a step of one token per row, each in the slot of its own number.

        Args:
            workspace: where keys and values are.
            slots_B: [B] int64, 0 to B - 1.
            lengths_B: [B] int64, tokens already stored.
            longest: the largest of them.
        """
        return Decode(workspace, lengths_B, longest, equal=False)

    def _embedded(self, ids_BP: torch.Tensor, positions_BP: torch.Tensor) -> torch.Tensor:
        """[B, P, E] tokens, with their positions where these are learned."""
        x = F.embedding(ids_BP, self.plan.embedding.weight)
        if self.plan.embed_scale != 1.0:
            x = x * self.plan.embed_scale
        learned = self.plan.positions
        if learned is not None:
            x = x + F.embedding(positions_BP + learned.offset, learned.module.weight)
        return x

    def _attention(
        self,
        y_NE: torch.Tensor,
        shape: tuple[int, int],
        layer: LayerPlan,
        rotation: Rotation | None,
        step: Step,
    ) -> torch.Tensor:
        """[B, P, H * D] attention over the row, before the output projection."""
        ops = self.ops
        query, key, value = (
            x.view(*shape, -1, layer.head_dim).transpose(1, 2)
            for x in ops.project(y_NE, (layer.query, layer.key, layer.value))
        )
        if layer.query_norm is not None:
            query = ops.head_norm(query, layer.query_norm)
        if layer.key_norm is not None:
            key = ops.head_norm(key, layer.key_norm)
        if rotation is not None:
            query, key = ops.rotate(query, key, *rotation)
        call = AttentionCall(
            layer.index, query, key, value, None, layer.scale, layer.window, None, _EXTRAS
        )
        return step.attend(call).transpose(1, 2).flatten(2)
