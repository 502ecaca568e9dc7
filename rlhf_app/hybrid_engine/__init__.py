"""The one-copy hybrid engine: one module trains under DeepSpeed and generates in place."""

from __future__ import annotations

from rlhf_app.hybrid_engine.decode import Rollout, RolloutTimings
from rlhf_app.hybrid_engine.engine import Breakdown, HybridEngine, initialize, weights_of
from rlhf_app.hybrid_engine.generate_output import GenerateOutput
from rlhf_app.hybrid_engine.generator import Generator
from rlhf_app.hybrid_engine.sampling import SamplingParams

__all__ = [
    "Breakdown",
    "GenerateOutput",
    "Generator",
    "HybridEngine",
    "Rollout",
    "RolloutTimings",
    "SamplingParams",
    "initialize",
    "weights_of",
]
