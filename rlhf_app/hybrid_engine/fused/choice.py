"""Whether a session's forwards run fused, or through the module."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from rlhf_app.hybrid_engine.fused import ops_triton
from rlhf_app.hybrid_engine.fused.decoder import FusedDecoder
from rlhf_app.hybrid_engine.fused.ops import Ops
from rlhf_app.hybrid_engine.fused.ops_torch import TorchOps
from rlhf_app.hybrid_engine.fused.plan import read_plan
from rlhf_app.hybrid_engine.fused.probe import disagrees

if TYPE_CHECKING:
    from rlhf_app.hybrid_engine.inference_model import InferenceModel

logger = logging.getLogger(__name__)


class FusedChoice:
    """Chooses anew in every session: adapters and hooks come and go between them.

    Attributes:
        reason: why the last session's forwards ran through the module, in a few words; empty
            where they ran fused.
    """

    def __init__(self) -> None:
        self.reason = "not asked yet"
        self._decoder: FusedDecoder | None = None
        self._verdict: str | None = None
        self._asked_with: object = None

    def decoder(self, model: InferenceModel) -> FusedDecoder | None:
        """The decoder that runs this session's forwards; None: the module does.

        Args:
            model: inside its session, its forwards still the module's own. The first time for
                a plan, both ways run and are compared.
        """
        decoder, reason = self._find(model)
        if reason and reason != self.reason:
            logger.debug("forwards of rollouts run through the module: %s", reason)
        self.reason = reason
        return decoder

    def _find(self, model: InferenceModel) -> tuple[FusedDecoder | None, str]:
        if model.weights.lockstep:
            return None, "weights are gathered in every forward"
        if torch.is_autocast_enabled(model.device.type):
            return None, "autocast"
        plan = read_plan(model.model)
        if isinstance(plan, str):
            return None, plan
        asked_with = plan, model.dtype, model.device
        if self._decoder is None or asked_with != self._asked_with:
            self._decoder = FusedDecoder(plan, ops_for(model.device))
            self._verdict = disagrees(model, self._decoder)
            self._asked_with = asked_with
        if self._verdict is not None:
            return None, self._verdict
        return self._decoder, ""


def ops_for(device: torch.device) -> Ops:
    """Operations for a device.

    Args:
        device: of the weights.
    """
    return ops_triton.TritonOps() if ops_triton.available(device) else TorchOps()
