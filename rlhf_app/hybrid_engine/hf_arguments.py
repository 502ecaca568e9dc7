"""The arguments of transformers' `generate`, read as a request to the engine.

Shapes: B rows, P prompt tokens.

Nothing is ignored: what the engine does not do is named in `reasons`, and the call then goes
to transformers as it came.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from rlhf_app.errors import ConfigError
from rlhf_app.hybrid_engine.inference_model import output_vocabulary
from rlhf_app.hybrid_engine.request_checks import check_length
from rlhf_app.hybrid_engine.sampling import SamplingParams

# Generation settings that the engine implements, or that cannot change its result.
_SUPPORTED = frozenset(
    {
        "max_new_tokens", "max_length", "do_sample", "temperature", "top_k", "top_p",
        "eos_token_id", "pad_token_id", "bos_token_id", "suppress_tokens",
        "num_return_sequences", "return_dict_in_generate", "transformers_version",
        "decoder_start_token_id",  # of encoder-decoders, which never get here
    }
)  # fmt: skip
# These shape only the sampled distribution: transformers does not read them when greedy.
_SAMPLING_ONLY = frozenset(
    {"temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"}
)
# Zero switches these off; of any other number, zero is a value (a forced token 0, a time limit).
_ZERO_IS_OFF = frozenset(
    {
        "min_length", "min_new_tokens", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size",
        "epsilon_cutoff", "eta_cutoff", "diversity_penalty", "min_p",
    }
)  # fmt: skip
_LISTS = frozenset({"logits_processor", "stopping_criteria"})
# transformers' length of an answer where nobody gives one.
_DEFAULT_NEW_TOKENS = 20


@dataclass(slots=True)
class Request:
    """One call of `generate`.

    Attributes:
        prompts: token ids without padding, one per returned row.
        params: how tokens are drawn, or None when `reasons` is not empty.
        pad_id: fills rows that ended early.
        return_dict: return a `ModelOutput` instead of ids.
        reasons: arguments the engine does not implement, in words.
    """

    prompts: list[list[int]] = field(default_factory=list)
    params: SamplingParams | None = None
    pad_id: int = 0
    return_dict: bool = False
    reasons: list[str] = field(default_factory=list)


def read_request(
    model: PreTrainedModel,
    input_ids: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
    arguments: dict[str, Any],
    max_out_tokens: int | None = None,
) -> Request:
    """Interpret one call as transformers would.

    Args:
        model: its generation config gives the defaults.
        input_ids: [B, P] left-padded.
        attention_mask: [B, P], 1 on real tokens; None: found from the pad id as transformers
            finds it.
        arguments: every other argument of the call.
        max_out_tokens: most tokens of a row, whoever generates it; None is no limit.

    Raises:
        ConfigError: a row without any token, or one that could grow beyond `max_out_tokens`.
    """
    arguments = dict(arguments)
    given = arguments.pop("generation_config", None)
    config, extras = model._prepare_generation_config(given, **arguments)
    model_length = config.max_length if model.generation_config.max_length is not None else None
    # Without a length of the caller's, transformers' rule for its default applies, not ours.
    if arguments.get("max_length") is None and (given is None or given.max_length is None):
        config.max_length = None
    request = Request(return_dict=bool(config.return_dict_in_generate))
    request.reasons = _unsupported(config, extras)
    if model.config.is_encoder_decoder:
        request.reasons = [f"model type {model.config.model_type!r} (an encoder-decoder)"]
    if input_ids is None or input_ids.dim() != 2:
        request.reasons.append("a call without 2-D input_ids")
        return request
    if attention_mask is not None and attention_mask.shape != input_ids.shape:
        request.reasons.append("an attention_mask of another shape than input_ids")
    elif attention_mask is not None and not _is_binary(attention_mask):
        # transformers attends where it is not 0, but counts positions by its sum.
        request.reasons.append("an attention_mask of other values than 0 and 1")
    _check_bound(config, model_length, input_ids, attention_mask, max_out_tokens)
    if request.reasons:
        return request
    stop_ids = _as_tuple(config.eos_token_id)
    mask = _mask(input_ids, attention_mask, config.pad_token_id, stop_ids)
    if (mask[:, 1:] < mask[:, :-1]).any():
        request.reasons.append("an attention_mask that is not left-padded")
    budget = _budget(config, input_ids.shape[1])
    if budget is None:
        request.reasons.append("a call without max_new_tokens, or max_length beyond the prompt")
    if request.reasons or budget is None:
        return request
    request.prompts = _prompts(input_ids, mask, config.num_return_sequences)
    request.pad_id = _pad_id(config.pad_token_id, stop_ids)
    request.params = _params(config, stop_ids, budget, output_vocabulary(model))
    return request


def _unsupported(config: GenerationConfig, extras: dict[str, Any]) -> list[str]:
    """Names of settings that would change the result and are not implemented."""
    defaults = GenerationConfig._get_default_generation_params()
    ignored = _SUPPORTED if config.do_sample else _SUPPORTED | _SAMPLING_ONLY
    reasons = []
    for name, value in vars(config).items():
        if name.startswith("_") or name in ignored or value == defaults.get(name):
            continue
        off = value is None or (value is False and name != "use_cache")
        if not off and not (name in _ZERO_IS_OFF and value == 0):
            reasons.append(name)
    if config.do_sample:
        # Nobody's distribution but transformers': uniform, and the one best token.
        if config.temperature == math.inf:
            reasons.append("temperature=inf")
        if config.top_p == 0:
            reasons.append("top_p=0")
    if not config.do_sample and config.num_return_sequences != 1:
        reasons.append("num_return_sequences without do_sample")
    for name, value in extras.items():
        empty = name in _LISTS and isinstance(value, list) and not value
        if not (value is None or value is False or empty):
            reasons.append(name)
    return sorted(set(reasons))


def _mask(
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    pad_id: int | None,
    stop_ids: tuple[int, ...],
) -> torch.Tensor:
    """[B, P] int64 on the CPU; padding is inferred only where it cannot be an end of text."""
    if attention_mask is not None:
        return attention_mask.ne(0).to("cpu", torch.int64)
    if pad_id is None or pad_id in stop_ids:
        return torch.ones(input_ids.shape, dtype=torch.int64)
    return input_ids.ne(pad_id).to("cpu", torch.int64)


def _is_binary(mask: torch.Tensor) -> bool:
    return mask.dtype == torch.bool or bool(((mask == 0) | (mask == 1)).all())


def _check_bound(
    config: GenerationConfig,
    model_length: int | None,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    max_out_tokens: int | None,
) -> None:
    """Bound the longest row of a call, which may be one for transformers."""
    if max_out_tokens is None or not input_ids.numel():
        return
    width = input_ids.shape[1]
    total = config.max_length if config.max_length is not None else model_length
    new_tokens = _DEFAULT_NEW_TOKENS if total is None else max(total - width, 0)
    if config.max_new_tokens is not None:
        new_tokens = config.max_new_tokens
    stop_ids = _as_tuple(config.eos_token_id)
    known = attention_mask is None or attention_mask.shape == input_ids.shape
    mask = _mask(input_ids, attention_mask if known else None, config.pad_token_id, stop_ids)
    prompt = int(mask.sum(dim=1).max()) if known else width
    check_length(prompt, new_tokens, {"hybrid_engine.max_out_tokens": max_out_tokens})


def _budget(config: GenerationConfig, prompt_length: int) -> int | None:
    """Tokens to generate, or None where transformers would use or refuse a default."""
    if config.max_new_tokens is not None:
        return int(config.max_new_tokens) if config.max_new_tokens > 0 else None
    if config.max_length is None or config.max_length <= prompt_length:
        return None
    return int(config.max_length) - prompt_length


def _prompts(input_ids: torch.Tensor, mask: torch.Tensor, copies: int) -> list[list[int]]:
    """Rows without their padding, each `copies` times in a row."""
    prompts = []
    starts = (input_ids.shape[1] - mask.sum(dim=1)).tolist()
    for index, (row, start) in enumerate(zip(input_ids.tolist(), starts, strict=True)):
        if start == len(row):
            raise ConfigError(f"generate: row {index} of attention_mask is all 0: remove the row")
        prompts += [row[start:]] * copies
    return prompts


def _params(
    config: GenerationConfig, stop_ids: tuple[int, ...], budget: int, vocabulary: int
) -> SamplingParams:
    # transformers looks for each token among the ids: others say nothing.
    suppress = tuple(i for i in _as_tuple(config.suppress_tokens) if 0 <= i < vocabulary)
    if not config.do_sample:
        return SamplingParams(budget, greedy=True, stop_ids=stop_ids, suppress_ids=suppress)
    # torch.manual_seed decides, as it does for transformers.
    seed = int(torch.randint(2**62, (1,)))
    top_p = config.top_p
    # transformers reads it where it is below 1 (which NaN is not).
    keeps_all = top_p is None or (isinstance(top_p, float | int) and not top_p < 1)
    return SamplingParams(
        budget,
        temperature=1.0 if config.temperature is None else config.temperature,
        top_k=config.top_k or 0,
        top_p=1.0 if keeps_all else top_p,
        stop_ids=stop_ids,
        suppress_ids=suppress,
        seed=seed,
    )


def _as_tuple(ids: Any) -> tuple[int, ...]:
    """One id, several in a list or a tensor, or None."""
    if torch.is_tensor(ids):
        ids = ids.reshape(-1).tolist()
    if ids is None:
        return ()
    return (ids,) if isinstance(ids, int) else tuple(ids)


def _pad_id(pad_id: int | None, stop_ids: tuple[int, ...]) -> int:
    """transformers pads with the first end-of-text id when there is no pad id."""
    if pad_id is not None:
        return pad_id
    return stop_ids[0] if stop_ids else 0
