"""The training module seen as an inference model: ids and positions in, next-token logits out.

Shapes: B rows, P prompt tokens, V vocabulary.

Nothing is copied or replaced: for the time of a `session` the module's own forward runs with its
attention routed to the KV workspace, or, where `fused` knows the model, the same computation in
fewer kernels over the same parameters.
"""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from rlhf_app.hybrid_engine import adapters, attention, lora
from rlhf_app.hybrid_engine.fused.choice import FusedChoice
from rlhf_app.hybrid_engine.fused.decoder import FusedDecoder
from rlhf_app.hybrid_engine.temporarily import temporarily
from rlhf_app.hybrid_engine.weights import ResidentWeights, Weights
from rlhf_app.models.surroundings import hooks_within, values_of


class InferenceModel:
    """Forwards of a Hugging Face causal LM for prompts and for single tokens.

    Args:
        model: the module that is trained, or peft's wrapper around it; its parameters are used
            where they are.
        weights: how they become usable; unset: they are.

    Attributes:
        lora_rollout: how LoRA adapters run in a session; see `hybrid_engine.lora`.
        fused: chooses in each session between the module's forward and a fused one.
        kernels: compiled ones for the CPU that the next session uses; None: torch's operations.
    """

    def __init__(self, model: PreTrainedModel, weights: Weights | None = None) -> None:
        model = lora.without_wrapper(model)
        self.model = model
        self.lora_rollout: lora.RolloutMode = "unfused"
        self.weights: Weights = weights if weights is not None else ResidentWeights()
        self.configs = _distinct_configs(model)
        self.text_config = model.config.get_text_config(decoder=True)
        parameters = inspect.signature(model.forward).parameters
        self._takes_positions = "position_ids" in parameters
        self.fused = FusedChoice()
        self.kernels: ctypes.CDLL | None = None
        self._decoder: FusedDecoder | None = None

    @property
    def device(self) -> torch.device:
        """Where ids go in: the device of the input embedding."""
        device: torch.device = self._input_embedding().weight.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights, and so of keys and values."""
        dtype: torch.dtype = self._input_embedding().weight.dtype
        return dtype

    @property
    def input_vocabulary(self) -> int:
        """Ids that the model takes: 0 to this, exclusive."""
        rows = getattr(self._input_embedding(), "num_embeddings", None)
        return int(rows or self.text_config.vocab_size)

    @property
    def output_vocabulary(self) -> int:
        """Number of logits."""
        return output_vocabulary(self.model)

    def _input_embedding(self) -> Any:
        """peft's wrapper around it would compute its weight anew, or not know its size."""
        return lora.base_layer(self.model.get_input_embeddings())

    @property
    def kv_dtype(self) -> torch.dtype:
        """Of keys and values: autocast's where it is on, else the weights'."""
        kind = self.device.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.dtype

    @contextmanager
    def evaluation(self, whole: bool = False) -> Iterator[None]:
        """Leave training mode and record no gradients; every module's mode is restored.

        `no_grad` and not `inference_mode`: whatever is made inside (a lazily built buffer,
        a cast weight) must still be usable by the training forward.

        Args:
            whole: every weight whole at once, for forwards that ranks run at their own pace.
        """
        weights = self.weights.whole() if whole else self.weights.available()
        training = [module for module in self.model.modules() if module.training]
        with (
            temporarily(training, "training", False),
            torch.inference_mode(False),
            weights,
            torch.no_grad(),
        ):
            yield

    @contextmanager
    def session(self, name: str = attention.NAME) -> Iterator[None]:
        """`evaluation`, with attention routed to the workspace.

        Args:
            name: attention to install. Only under its own name do forwards run fused: another
                one wants to see what the model's layers ask for.
        """
        with (
            self.evaluation(),
            attention.installed(self.configs, name),
            adapters.installed(self.model),
            lora.rollout_forward(self.model, self.lora_rollout),
            _quiet(self.model),
            # A compiled forward would trace the attention that stands in for its own.
            torch.compiler.set_stance("force_eager"),
        ):
            decoder = self.fused.decoder(self) if name == attention.NAME else None
            with temporarily([self], "_decoder", decoder):
                yield

    def prefill(
        self, ids_BP: torch.Tensor, lengths_B: torch.Tensor, step: attention.Step
    ) -> torch.Tensor:
        """Run right-padded prompts.

        Args:
            ids_BP: [B, P] int64; what follows a row's length is ignored.
            lengths_B: [B] int64 in 1..P.
            step: serves the attention layers.

        Returns:
            [B, V] logits at each row's last real token. The head never sees the others: with
            a large vocabulary their logits would be the largest tensor of the whole run.
        """
        positions = torch.arange(ids_BP.shape[1], device=ids_BP.device).expand(ids_BP.shape)
        if self._decoder is not None:
            return self._decoder(ids_BP, positions, step, lengths_B - 1)
        rows = torch.arange(ids_BP.shape[0], device=ids_BP.device)

        def last_token(_: torch.nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
            return (args[0][rows, lengths_B - 1][:, None],)

        hook = self.model.get_output_embeddings().register_forward_pre_hook(last_token)
        try:
            return self._forward(ids_BP, positions, step)[:, 0]
        finally:
            hook.remove()

    def decode(
        self, tokens_B: torch.Tensor, positions_B: torch.Tensor, step: attention.Step
    ) -> torch.Tensor:
        """Run one token per row.

        Args:
            tokens_B: [B] int64.
            positions_B: [B] int64 position of each token in its row.
            step: serves the attention layers.

        Returns:
            [B, V] logits of the next token.
        """
        if self._decoder is not None:
            return self._decoder(tokens_B[:, None], positions_B[:, None], step)
        return self._forward(tokens_B[:, None], positions_B[:, None], step)[:, 0]

    def _forward(
        self, ids: torch.Tensor, positions: torch.Tensor, step: attention.Step
    ) -> torch.Tensor:
        extras: dict[str, Any] = {"position_ids": positions} if self._takes_positions else {}
        with attention.active(step):
            output = self.model(
                input_ids=ids, attention_mask=None, use_cache=False, return_dict=True, **extras
            )
        return output.logits

    def fingerprint(self) -> Hashable:
        """What a captured forward depends on besides its inputs: equal means that a replay
        reads the weights where they are now."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        places = tuple((t.data_ptr(), t.shape, t.stride()) for t in tensors)
        plan = None if self._decoder is None else self._decoder.plan
        around = hooks_within(self.model), tuple(map(values_of, self.configs))
        return places, lora.rollout_state(self.model), plan, around

    @property
    def takes_positions(self) -> bool:
        """Whether the forward can be told positions, as ragged rows need."""
        return self._takes_positions


def output_vocabulary(model: PreTrainedModel) -> int:
    """Number of logits of a causal LM.

    Args:
        model: the model, with or without adapters in it.
    """
    features = getattr(lora.base_layer(model.get_output_embeddings()), "out_features", None)
    return int(features or model.config.get_text_config(decoder=True).vocab_size)


@contextmanager
def _quiet(model: torch.nn.Module) -> Iterator[None]:
    """Without the look for padding that some forwards take: it makes the host wait."""
    name = "warn_if_padding_and_no_attention_mask"
    if not hasattr(model, name):
        yield
        return
    quiet = [m for m in model.modules() if hasattr(m, name)]
    try:
        for module in quiet:
            module.__dict__[name] = _no_warning
        yield
    finally:
        for module in quiet:
            module.__dict__.pop(name, None)


def _no_warning(*_: Any, **__: Any) -> None:
    return None


def _distinct_configs(model: torch.nn.Module) -> list[PreTrainedConfig]:
    """Every config object that some module reads its attention's name from."""
    found: dict[int, PreTrainedConfig] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig):
            found[id(config)] = config
    return list(found.values())
