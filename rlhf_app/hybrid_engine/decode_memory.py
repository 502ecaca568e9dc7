"""What a generator keeps on the device from one rollout to the next."""

from __future__ import annotations

from collections.abc import Callable

from rlhf_app.config.schema import HybridEngineSettings
from rlhf_app.hybrid_engine.decode_state import DecodeState
from rlhf_app.hybrid_engine.decode_step import DecodeStep
from rlhf_app.hybrid_engine.inference_model import InferenceModel
from rlhf_app.hybrid_engine.kv_workspace import KVWorkspace, LayerShape, free_bytes, rounded

# Of the free memory, what a workspace may take where nobody bounds it: prefill and logits need
# some of it, and where the workspace stays while the model trains, activations need more.
_SHARE_RELEASED, _SHARE_KEPT = 0.8, 0.5


class DecodeMemory:
    """KV workspace, decode buffers and captured steps of one model.

    Attributes:
        state: buffers of the decode loop.

    Args:
        model: the model.
        settings: `release_inference_cache` and `enable_cuda_graph` count here.
        layers: asks what each attention layer stores.
    """

    def __init__(
        self,
        model: InferenceModel,
        settings: HybridEngineSettings,
        layers: Callable[[], tuple[LayerShape, ...]],
    ) -> None:
        self._model = model
        self._settings = settings
        self._layers = layers
        self._workspace: KVWorkspace | None = None
        self._step: DecodeStep | None = None
        self.state = DecodeState(model.device)

    def borrow(self, slots: int, longest: int) -> KVWorkspace:
        """The workspace, with room for `slots` rows of `longest` tokens.

        Raises:
            RuntimeError: the memory is not there.
        """
        workspace = self._kv_workspace()
        workspace.borrow(slots, rounded(longest))
        return workspace

    @property
    def step(self) -> DecodeStep:
        """Runs decode steps, and keeps the graphs captured of them."""
        if self._step is None:
            graphs = self._settings.enable_cuda_graph
            self._step = DecodeStep(self._model, self._layers(), graphs)
        return self._step

    def slots_that_fit(self, longest: int) -> int | None:
        """Rows of this length that find room in the device's memory; None on the host.

        Ranks may count differently: what a request draws does not depend on it.
        """
        if self._model.device.type != "cuda":
            return None
        share = _SHARE_RELEASED if self._settings.release_inference_cache else _SHARE_KEPT
        workspace = self._kv_workspace()
        room = int(share * (free_bytes(self._model.device) + workspace.nbytes))
        return max(1, room // workspace.bytes_for(1, rounded(longest)))

    def release(self) -> None:
        """Give everything back; the next rollout takes it anew."""
        if self._workspace is not None:
            self._workspace.release()
        if self._step is not None:
            self._step.drop_graphs()  # they read the workspace where it was
        self.state.release()

    @property
    def workspace_bytes(self) -> int:
        """Bytes that the workspace holds now."""
        return 0 if self._workspace is None else self._workspace.nbytes

    @property
    def workspace_peak_bytes(self) -> int:
        """The most bytes that the workspace has held so far."""
        return 0 if self._workspace is None else self._workspace.peak_bytes

    def _kv_workspace(self) -> KVWorkspace:
        made_for = self._model.kv_dtype, self._model.device
        if self._workspace is not None and self._workspace.made_for != made_for:
            self.release()  # the model was cast or moved since
            self._workspace, self._step = None, None
            self.state = DecodeState(self._model.device)
        if self._workspace is None:
            self._workspace = KVWorkspace(self._layers(), *made_for)
        return self._workspace
