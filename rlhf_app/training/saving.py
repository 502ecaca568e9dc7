"""Artifacts: Hugging Face directories that plain transformers can load, whole or absent."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rlhf_app.models.lora import ADAPTER, has_adapters, merge_state, save_adapter
from rlhf_app.training.deepspeed_module import load_deepspeed
from rlhf_app.training.distributed import Dist
from rlhf_app.training.error_phase import within
from rlhf_app.training.files import atomic_directory


def unwrap(engine_or_model: Any) -> Any:
    """The model inside an engine, or the model itself."""
    return getattr(engine_or_model, "module", engine_or_model)


@contextmanager
def gathered(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Makes parameters whole that ZeRO-3 has partitioned; does nothing for others.

    Every rank must enter with the same parameters.
    """
    partitioned = [p for p in parameters if hasattr(p, "ds_id")]
    if not partitioned:
        yield
        return
    with load_deepspeed().zero.GatheredParameters(partitioned):
        yield


def gather_state_dict(model: nn.Module, dist: Dist) -> dict[str, torch.Tensor]:
    """Copies the weights to the main process's memory, one tensor at a time.

    A partitioned model is never whole on any device: each tensor is gathered, copied by the
    main process and let go. Tied weights stay tied: their keys hold one tensor.

    Args:
        model: inside an engine of any ZeRO stage, or plain. Every rank must call.
        dist: this process's place.

    Returns:
        State dict on the CPU in the training dtype; empty on other ranks.
    """
    copies: dict[int, torch.Tensor] = {}
    state: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in copies:
            with gathered([tensor]):
                if dist.is_main:
                    copies[id(tensor)] = tensor.detach().to("cpu", copy=True).contiguous()
                else:
                    copies[id(tensor)] = torch.empty(0)
        state[name] = copies[id(tensor)]
    return state if dist.is_main else {}


@within("saving")
def save_causal_lm(
    engine_or_model: Any,
    tokenizer: Any,
    directory: Path,
    dist: Dist,
    stop_ids: Sequence[int] = (),
    state: dict[str, torch.Tensor] | None = None,
) -> None:
    """Writes a causal LM with its tokenizer, chat template and generation config.

    LoRA adapters are merged into the weights that are written, not into the model; alone they
    are written to `adapter/` in the directory.

    The main process writes; every rank must call, and returns when the artifact is there.

    Args:
        engine_or_model: a Hugging Face causal LM, or an engine around it.
        tokenizer: saved beside it.
        directory: replaced as a whole when writing has succeeded.
        dist: this process's place.
        stop_ids: become the generation config's EOS ids, so that generation stops where
            training ended its answers; empty leaves them as they are.
        state: other weights of this model to write in place of its own, as
            `gather_state_dict` returns them.
    """
    model = unwrap(engine_or_model)
    if state is None:
        state = gather_state_dict(model, dist)
    if dist.is_main:
        with atomic_directory(directory) as temporary, _copies_of_configs(model):
            # Training turned the cache off; a loaded artifact should generate with it.
            model.config.use_cache = True
            _fit_generation_config(model, tokenizer, stop_ids)
            model.save_pretrained(temporary, state_dict=merge_state(model, state))
            if has_adapters(model):
                save_adapter(model, state, temporary / ADAPTER)
            tokenizer.save_pretrained(temporary)
    dist.barrier()


@contextmanager
def _copies_of_configs(model: Any) -> Iterator[None]:
    """The model has copies of its configs for a while; saving changes those.

    transformers writes the dtype into the config as a string. Where training goes on after that,
    ranks whose configs differ gather the weights that ZeRO-3 split in unlike ways, and abort.
    """
    config, generation = model.config, model.generation_config
    model.config, model.generation_config = copy.deepcopy(config), copy.deepcopy(generation)
    try:
        yield
    finally:
        model.config, model.generation_config = config, generation


def _fit_generation_config(model: Any, tokenizer: Any, stop_ids: Sequence[int]) -> None:
    generation = model.generation_config
    generation.use_cache = True
    if stop_ids:
        generation.eos_token_id = list(stop_ids) if len(stop_ids) > 1 else stop_ids[0]
    if generation.pad_token_id is None:
        generation.pad_token_id = tokenizer.pad_token_id
    # Some published models set a temperature without sampling, which transformers loads
    # but refuses to save.
    if not generation.do_sample and any(
        getattr(generation, name) is not None for name in ("temperature", "top_p", "top_k")
    ):
        defaults = type(generation)()
        for name in ("temperature", "top_p", "top_k", "min_p", "typical_p"):
            setattr(generation, name, getattr(defaults, name))
