"""One decode step for the first B rows: eagerly, or as the replay of a captured CUDA graph.

A graph holds the whole step: forward, sampling, log-probs, end of answers, positions. It is
captured once per bucket of row counts and kind of sampling, and replayed for as long as
everything that it reads stays where it was. The addresses are compared at the start of every
rollout and the graphs dropped when one differs: weights that change in place are followed,
weights that move can never be read at their old address.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch

from rlhf_app.hybrid_engine import decode_kernel
from rlhf_app.hybrid_engine.attention import AttentionCall, Decode
from rlhf_app.hybrid_engine.cpu_decode import CpuDecode
from rlhf_app.hybrid_engine.decode_state import POSITION, SLOT, TOKEN, DecodeState, distribution
from rlhf_app.hybrid_engine.inference_model import InferenceModel
from rlhf_app.hybrid_engine.kv_workspace import KVWorkspace, LayerShape
from rlhf_app.hybrid_engine.sampling import SamplingParams

logger = logging.getLogger(__name__)

GRAPH = "cuda graph"
COMPILED = "compiled kernels"
# Capturing costs a few eager steps; where it has to be redone for every rollout, shorter
# answers than this do not win it back.
RECAPTURE_PAYS_TOKENS = 32
# Without the kernel a graph reads a fixed number of positions: buckets of this many.
_POSITION_BUCKET = 256
# Kinds of sampling and of batch that come once leave graphs behind: beyond this they go.
_MOST_GRAPHS = 256


def bucket(rows: int, slots: int) -> int:
    """Rows that a step for `rows` rows computes: few sizes, so that few graphs are needed.

    Args:
        rows: active rows, in 1..slots.
        slots: the most that there can be.
    """
    if rows <= 64:
        size = 1 << (rows - 1).bit_length()
    else:
        unit = 32 if rows <= 256 else 64
        size = -(-rows // unit) * unit
    return min(size, slots)


@dataclass(slots=True)
class KernelDecode:
    """One new token for each row, through the decode kernel: no length on the host.

    Attributes:
        workspace: where keys and values are.
        slots_B: [B] int64, slot of each row.
        lengths_B: [B] int64, tokens already stored.
        kept: tensors that a captured step reads beside parameters and buffers.
    """

    workspace: KVWorkspace
    slots_B: torch.Tensor
    lengths_B: torch.Tensor
    kept: list[torch.Tensor] = field(default_factory=list)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Store the new key and value, then attend over the row so far."""
        biases_HL = None
        if call.alibi is not None:
            biases_HL = call.alibi.table(self.workspace.positions)
            self.kept.append(biases_HL)
        keys, values = self.workspace.keys[call.layer], self.workspace.values[call.layer]
        # Under autocast they may come in another type than the workspace's: mostly no-ops.
        query, key, value = (x.to(keys.dtype) for x in (call.query, call.key, call.value))
        return decode_kernel.decode_attention(
            query, key, value, keys, values, self.slots_B, self.lengths_B,
            scale=call.scale, window=call.window, softcap=call.softcap, biases_HL=biases_HL,
            rounded=call.rounded,
        )  # fmt: skip


@dataclass(slots=True)
class _Graph:
    graph: Any
    kept: list[Any]  # what it reads beside parameters, buffers, workspace and state


class DecodeStep:
    """Decode steps of one model, and the graphs captured of them.

    Attributes:
        form: how the steps of this rollout run: `GRAPH`, `COMPILED`, or "eager" and the reason.
        any_slot: rows need not be in the slots of their own number.

    Args:
        model: the model.
        layers: what each attention layer stores.
        use_graphs: the `enable_cuda_graph` setting.
    """

    def __init__(
        self, model: InferenceModel, layers: tuple[LayerShape, ...], use_graphs: bool
    ) -> None:
        self._model = model
        self._use_graphs = use_graphs
        self._has_kernel = all(
            decode_kernel.available(model.device, shape.key_dim, shape.value_dim)
            for shape in layers
        )
        self._equal_heads = all(shape.key_dim == shape.value_dim for shape in layers)
        self._compiled: ctypes.CDLL | None = None
        self.any_slot = self._has_kernel
        self._graphs: dict[Hashable, _Graph] = {}
        self._warm: set[Hashable] = set()
        self._captured_at: Hashable = None
        self._pool: Any = None
        self._cannot = ""
        self.form = "eager"

    def begin(
        self, workspace: KVWorkspace, state: DecodeState, params: SamplingParams, slots: int
    ) -> None:
        """Start a rollout; the model must be inside its session.

        Args:
            workspace: borrowed for it.
            state: begun for it.
            params: how tokens are drawn.
            slots: rows decoded at once.
        """
        self._workspace, self._state, self._slots = workspace, state, slots
        self._compiled = self._model.kernels if self._equal_heads else None
        self.any_slot = self._has_kernel or self._compiled is not None
        reason = self._eager_reason(params)
        self.form = f"eager ({reason})" if reason else GRAPH
        if self._compiled is not None:
            self.form = COMPILED
        if reason:
            self.drop_graphs()
            return
        self._kind: Hashable = (distribution(params), slots)
        now = (self._model.fingerprint(), workspace.addresses, state.addresses)
        if now != self._captured_at or len(self._graphs) > _MOST_GRAPHS:
            self.drop_graphs()
            self._captured_at = now

    def __call__(self, rows: int, longest: int, equal: bool) -> None:
        """Run one step.

        Args:
            rows: active rows.
            longest: upper bound, known to the host, of the tokens that a row has stored.
            equal: every live row has stored exactly `longest`.
        """
        self._workspace.check(rows, longest + 1)
        if self.form != GRAPH:
            self._run(rows, longest, equal)
            return
        size = bucket(rows, self._slots)
        end = longest
        if not self.any_slot:
            last = self._workspace.positions - 1
            end = min(-(-(longest + 1) // _POSITION_BUCKET) * _POSITION_BUCKET - 1, last)
        key = (size, None if self.any_slot else end, self._kind)
        graph = self._graphs.get(key)
        if graph is not None:
            graph.graph.replay()
        elif key not in self._warm:
            # Kernels are compiled and libraries set up by a real step, outside any graph.
            self._run(size, end, False)
            self._warm.add(key)
        else:
            captured = self._capture(lambda: self._run(size, end, False))
            if captured is None:
                self._run(rows, longest, equal)
                return
            self._graphs[key] = captured
            captured.graph.replay()

    def drop_graphs(self) -> None:
        """Forget all graphs and the memory that they work in."""
        self._graphs.clear()
        self._warm.clear()
        self._captured_at = None
        self._pool = None

    @property
    def graphs(self) -> int:
        """Graphs held now."""
        return len(self._graphs)

    def _eager_reason(self, params: SamplingParams) -> str:
        weights = self._model.weights
        if self._model.device.type != "cuda":
            return "no CUDA device"
        if not self._use_graphs:
            return "enable_cuda_graph is false"
        if self._state.agree is not None:
            return "ranks exchange their parts of every step"
        if torch.is_autocast_enabled(self._model.device.type):
            return "autocast makes casts of the weights that a graph would not renew"
        if weights.lockstep:
            return "weights are gathered in every step"
        if not weights.settled and params.max_new_tokens < RECAPTURE_PAYS_TOKENS:
            return "weights move between rollouts and answers are short"
        return self._cannot

    def _run(self, rows: int, longest: int, equal: bool) -> list[torch.Tensor]:
        state = self._state.rows[:, :rows]
        step: Decode | KernelDecode | CpuDecode
        kept: list[torch.Tensor] = []
        if self._compiled is not None:
            step = CpuDecode(self._compiled, self._workspace, state[SLOT], state[POSITION])
        elif self.any_slot:
            step = KernelDecode(self._workspace, state[SLOT], state[POSITION], kept)
        else:
            step = Decode(self._workspace, state[POSITION], longest, equal)
        logits_BV = self._model.decode(state[TOKEN], state[POSITION], step)
        self._state.record(state, logits_BV)
        return kept

    def _capture(self, run: Callable[[], list[torch.Tensor]]) -> _Graph | None:
        """Capture a step without running it; None, with one warning, where that fails."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        device = self._model.device
        torch.cuda.synchronize(device)
        random_state = torch.cuda.get_rng_state(device)
        try:
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                kept = run()
        except RuntimeError as error:
            text = " ".join(str(error).split())[:120]
            self._cannot = f"its decode step cannot be captured: {text}"
            self.form = f"eager ({self._cannot})"
            self.drop_graphs()
            kind = self._model.model.config.model_type
            logger.warning("model type %r decodes without CUDA graphs: %s", kind, self._cannot)
            torch.cuda.synchronize(device)
            _renew_generator(device, random_state)
            return None
        return _Graph(graph, [*kept, self._state.constants])


def _renew_generator(device: torch.device, state: torch.Tensor) -> None:
    """Free torch's generator from a capture that failed: it would refuse to draw ever after."""
    fresh = torch.Generator(device)
    fresh.set_state(state)
    index = torch.cuda.current_device() if device.index is None else device.index
    default = torch.cuda.default_generators[index]
    default.graphsafe_set_state(fresh.graphsafe_get_state())
