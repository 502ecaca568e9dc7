"""Whether a session's forwards run fused, or through the module."""

from __future__ import annotations

import ctypes
import logging
from typing import TYPE_CHECKING

import torch

from rlhf_app.hybrid_engine.fused import ops_triton
from rlhf_app.hybrid_engine.fused.compiled_decoder import CompiledDecoder, suits
from rlhf_app.hybrid_engine.fused.decoder import FusedDecoder
from rlhf_app.hybrid_engine.fused.ops import Ops
from rlhf_app.hybrid_engine.fused.ops_torch import TorchOps
from rlhf_app.hybrid_engine.fused.plan import DecoderPlan, read_plan
from rlhf_app.hybrid_engine.fused.probe import disagrees

if TYPE_CHECKING:
    from rlhf_app.hybrid_engine.inference_model import InferenceModel

logger = logging.getLogger(__name__)


class FusedChoice:
    """Chooses anew in every session: adapters and hooks come and go between them.

    Attributes:
        reason: why the last session's forwards ran through the module, in a few words; empty
            where they ran fused.
        used: the last session's decoder; None where the module ran.
    """

    def __init__(self) -> None:
        self.reason = "not asked yet"
        self.used: FusedDecoder | None = None
        # By kind of operations: what was asked about, its decoder, and what is wrong with it.
        self._found: dict[bool, tuple[object, FusedDecoder, str | None]] = {}

    def decoder(self, model: InferenceModel) -> FusedDecoder | None:
        """The decoder that runs this session's forwards; None: the module does.

        Args:
            model: inside its session, its forwards still the module's own. The first time for
                a plan, both ways run and are compared.
        """
        decoder, reason = self._find(model)
        if reason and reason != self.reason:
            logger.debug("forwards of rollouts run through the module: %s", reason)
        self.reason, self.used = reason, decoder
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
        compiled = model.kernels is not None
        found = self._found.get(compiled)
        if found is None or found[0] != asked_with:
            decoder = decoder_for(plan, model.device, model.kernels)
            found = asked_with, decoder, disagrees(model, decoder)
            self._found[compiled] = found
        _, decoder, wrong = found
        if wrong is not None:
            return None, wrong
        if isinstance(decoder, CompiledDecoder):
            decoder.begin()
        return decoder, ""


def decoder_for(
    plan: DecoderPlan, device: torch.device, kernels: ctypes.CDLL | None
) -> FusedDecoder:
    """A decoder that suits model and device.

    Args:
        plan: what it computes.
        device: of the weights.
        kernels: compiled ones for fp32 on the CPU, or None.
    """
    if kernels is not None and suits(plan):
        return CompiledDecoder(plan, kernels)
    return FusedDecoder(plan, ops_for(device))


def ops_for(device: torch.device) -> Ops:
    """Operations for a device.

    Args:
        device: of the weights.
    """
    return ops_triton.TritonOps() if ops_triton.available(device) else TorchOps()
