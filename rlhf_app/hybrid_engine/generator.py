"""Generator: rollouts from the very module that is being trained."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from rlhf_app.config.schema import HybridEngineSettings
from rlhf_app.errors import ConfigError
from rlhf_app.hybrid_engine.agreement import Terms
from rlhf_app.hybrid_engine.capability import Capability, probe, require_decoder_only
from rlhf_app.hybrid_engine.decode import DecodeLoop, Rollout
from rlhf_app.hybrid_engine.decode_memory import DecodeMemory
from rlhf_app.hybrid_engine.exclusive import exclusively
from rlhf_app.hybrid_engine.fused.compiled import kernels_for
from rlhf_app.hybrid_engine.generate_output import as_output
from rlhf_app.hybrid_engine.hf_arguments import Request, read_request
from rlhf_app.hybrid_engine.inference_model import InferenceModel
from rlhf_app.hybrid_engine.kv_workspace import LayerShape
from rlhf_app.hybrid_engine.lora import RolloutMode
from rlhf_app.hybrid_engine.native import native_rollout
from rlhf_app.hybrid_engine.request_checks import (
    check_length,
    check_limits,
    check_prompts,
    check_suppressed,
)
from rlhf_app.hybrid_engine.sampling import SamplingParams, request_keys
from rlhf_app.hybrid_engine.tensor_parallel import SlicedWeights, warn_whole
from rlhf_app.hybrid_engine.tp_group import RankRequest, merged
from rlhf_app.hybrid_engine.weights import Weights

logger = logging.getLogger(__name__)

_MOST_PROBES = 3


class Generator:
    """Samples answers from a Hugging Face causal LM in place: no second copy of the weights.

    Args:
        model: any causal LM; families that the workspace attention cannot serve fall back to
            transformers' own generate, with one warning.
        settings: the `hybrid_engine` settings.
        weights: how the weights become usable for a rollout; unset: they are. With
            `SlicedWeights` every call is one of all ranks of the group.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        settings: HybridEngineSettings | None = None,
        weights: Weights | None = None,
    ) -> None:
        self._settings = settings if settings is not None else HybridEngineSettings()
        if not getattr(model, "can_generate", lambda: False)():
            raise ConfigError(
                f"rollouts need a Hugging Face language model with its head: "
                f"{type(model).__name__} cannot generate"
            )
        self._model = InferenceModel(model, weights)
        self._sliced = weights if isinstance(weights, SlicedWeights) else None
        self._capability: Capability | None = None
        self._failed_probes = 0
        self._memory = DecodeMemory(self._model, self._settings, _layers_of(weakref.ref(self)))
        self._warned: set[str] = set()
        #: Answers and answer tokens of all rollouts so far, and how the last one decoded.
        self.samples = 0
        self.tokens = 0
        self.form = ""
        #: Answer tokens of the rollouts that a few short ones stand for: these then run as
        #: rollouts of that many would, compiled or not.
        self.stands_for = 0

    def rollout(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        uids: Sequence[int] | None = None,
        max_slots: int | None = None,
        limits: Sequence[int] | None = None,
    ) -> Rollout:
        """Answer every prompt.

        Ranks that need each other (tensor parallel, ZeRO-3) all call this, each with its own
        prompts (of any number, even none, and any lengths). Those that share their rows give
        the same `params` but for seed and step. What one of them is refused, all are. Where
        they share rows, an error of one in the middle leaves the others waiting for the
        process group's timeout.

        Args:
            prompts: token ids of each prompt, of any lengths >= 1.
            params: how tokens are drawn.
            uids: one integer per prompt, the source of its randomness; unset: its index.
            max_slots: rows decoded at once; the others wait for a free slot. Unset: all, or on
                CUDA as many as find room in the memory that is free.
            limits: most tokens of each prompt's answer, in 1..max_new_tokens; unset: that.

        Returns:
            One answer per prompt, in order.

        Raises:
            ConfigError: an empty prompt, a row beyond the model's positions, bad arguments,
                ranks that share a rollout but sample differently.
            RuntimeError: no memory for the KV workspace, here or on a rank that shares it;
                another rank failed in this rollout (unpinned ZeRO-3); or the model is
                generating already, in another thread or around this call.
        """
        with exclusively(self.model):
            return self._rollout(prompts, params, uids, max_slots, limits)

    def _rollout(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        uids: Sequence[int] | None,
        max_slots: int | None,
        limits: Sequence[int] | None,
    ) -> Rollout:
        self._probe_again()
        self.capability  # noqa: B018 - the probe is a matter of all ranks, the checks are not
        mine, error = Terms(), None
        try:
            check_prompts(prompts, self._model.input_vocabulary)
            uids = range(len(prompts)) if uids is None else uids
            limits = check_limits(limits, len(prompts), params.max_new_tokens)
            self._check(prompts, params, uids, max_slots, limits)
            keys = request_keys(params.seed, params.step, uids).tolist()
            lengths = (len(prompt) + limit for prompt, limit in zip(prompts, limits, strict=True))
            longest = max(lengths, default=0)
            mine = Terms(self._lacking(longest), longest, len(prompts))
        except Exception as found:  # whatever it is, other ranks may be waiting
            error = found
        terms = self._agree(mine, error)
        if not terms.prompts:
            raise ConfigError("rollout: no prompts were given")
        # Ranks that share rows need room for the longest of all of them.
        longest = mine.longest if self._sliced is None else terms.longest
        slots = min(len(prompts), max_slots or len(prompts))
        if not self._serves(terms.reasons):
            assert uids is not None
            assert limits is not None
            return self._count(native_rollout(self._model, prompts, uids, params, limits, slots))
        request = RankRequest(
            prompts=[list(prompt) for prompt in prompts],
            keys=keys,
            params=params,
            limits=list(limits or ()),
            slots=slots,
            room=None if max_slots else self._memory.slots_that_fit(longest),
        )
        if self._sliced is None:
            return self._count(self._run(merged([request]), longest))
        group = self._sliced.group
        requests, error = [request], None
        try:
            requests = group.gather(request)
        except ConfigError as found:  # of one group, while weights come from all
            error = found
        self._raise(error)
        return self._count(group.own(self._run(merged(requests), longest), requests))

    def _run(self, request: RankRequest, longest: int) -> Rollout:
        """Decode over the workspace."""
        error: Exception | None = None
        try:
            workspace = self._memory.borrow(request.slots, longest)
        except RuntimeError as found:
            error = found
        self._raise(error)
        memory = self._memory
        memory.state.agree = None if self._sliced is None else self._sliced.group.same
        model = self._model
        tokens = max(len(request.prompts) * request.params.max_new_tokens, self.stands_for)
        model.kernels = kernels_for(self._settings, model.device, model.kv_dtype, tokens)
        try:
            with self._model.session(), self._model.weights.together():
                return DecodeLoop(
                    self._model, workspace, memory.state, memory.step,
                    request.prompts, torch.tensor(request.keys, dtype=torch.int64),
                    request.params, request.limits, request.slots,
                ).run()  # fmt: skip
        finally:
            if self._settings.release_inference_cache:
                self.release()

    def _raise(self, error: Exception | None) -> None:
        """Raise an error of this rank, or of one that it needs in a rollout."""
        self._agree(Terms(), error)

    def _agree(self, mine: Terms, error: Exception | None = None) -> Terms:
        """The terms of all ranks that need each other, or their errors: before any of them
        starts on what the others would wait in."""
        agreement = self._model.weights.agreement
        if agreement is not None:
            return agreement.settle(mine, error)
        if error is not None:
            raise error
        return mine

    def generate(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        **arguments: Any,
    ) -> Any:
        """transformers' `generate`: same arguments, same result.

        Arguments that the engine does not implement (beams, penalties, custom processors)
        send the call to transformers, with one warning per argument.

        Args:
            input_ids: [B, P] int64, left-padded.
            attention_mask: [B, P], 1 on real tokens; unset: found as transformers finds it.
            arguments: as of `transformers.GenerationMixin.generate`.

        Returns:
            [B, P + T] int64 on the device of `input_ids`; with `return_dict_in_generate` a
            `GenerateOutput`.

        Raises:
            ConfigError: a row without tokens, or one beyond the model's positions.
        """
        if input_ids is None:
            input_ids = arguments.pop("inputs", None)
        request = self._read(input_ids, attention_mask, arguments)
        if request.reasons or not self._settings.enabled or input_ids is None:
            for reason in request.reasons:
                self._warn(f"generate: {reason} is not implemented by the hybrid engine")
            with exclusively(self.model), self._model.evaluation(whole=True):
                return self._model.model.generate(
                    input_ids, attention_mask=attention_mask, **arguments
                )
        assert request.params is not None
        return as_output(self.rollout(request.prompts, request.params), request, input_ids)

    def _read(
        self, input_ids: torch.Tensor | None, mask: torch.Tensor | None, arguments: dict[str, Any]
    ) -> Request:
        """The caller's request; what one rank cannot do, no rank that needs it does."""
        request, error = Request(), None
        try:
            request = read_request(
                self._model.model, input_ids, mask, arguments, self._settings.max_out_tokens
            )
        except Exception as found:  # whatever it is, other ranks may be waiting
            error = found
        request.reasons = list(self._agree(Terms(tuple(request.reasons)), error).reasons)
        return request

    @property
    def model(self) -> PreTrainedModel:
        """The module that generates."""
        return self._model.model

    @property
    def capability(self) -> Capability:
        """What the model can do, probed on first use; ranks that share rollouts probe together."""
        if self._capability is None:
            self._capability = probe(self._model)
            if self._sliced is not None:
                mine = self._capability.missing
                missing = self._agree(Terms((mine,) if mine else ())).reasons
                if missing:
                    self._share_no_more(missing[0])
        return self._capability

    def _probe_again(self) -> None:
        """Forget a probe that ended in an error, a few times, where no other rank takes part."""
        found = self._capability
        if found is None or found.final or self._model.weights.agreement is not None:
            return
        if self._failed_probes < _MOST_PROBES:
            self._failed_probes += 1
            self._capability = None

    def _share_no_more(self, missing: str) -> None:
        """Go back to whole weights where slices do not compute what they do."""
        assert self._sliced is not None
        warn_whole(self._model.model, f"sliced, it lacks {missing}")
        self._model.weights = self._sliced.base
        self._sliced = None
        self._capability = probe(self._model)

    @property
    def lora_rollout(self) -> RolloutMode:
        """How LoRA adapters run in rollouts, `unfused` or `fused`: see `hybrid_engine.lora`."""
        return self._model.lora_rollout

    @lora_rollout.setter
    def lora_rollout(self, mode: RolloutMode) -> None:
        self._model.lora_rollout = mode

    @property
    def workspace_bytes(self) -> int:
        """Bytes that the KV workspace holds now."""
        return self._memory.workspace_bytes

    @property
    def workspace_peak_bytes(self) -> int:
        """The most bytes that the KV workspace has held so far."""
        return self._memory.workspace_peak_bytes

    def release(self) -> None:
        """Give the KV workspace back; the next rollout takes a new one."""
        self._memory.release()

    def _lacking(self, longest: int) -> tuple[str, ...]:
        """What the workspace path misses for rows of this length, in words."""
        if self.capability.missing is not None:
            return (self.capability.missing,)
        limit = self.capability.engine_positions
        if limit is not None and longest > limit:
            return (f"rotary positions fixed beyond {limit} tokens",)
        return ()

    def _serves(self, lacking: Sequence[str]) -> bool:
        """Whether the workspace path takes the rows of all ranks; warns where it does not."""
        if not self._settings.enabled:
            return False
        for missing in lacking:
            self._warn(f"model type {self.model.config.model_type!r} lacks {missing}")
        return not lacking

    def _count(self, rollout: Rollout) -> Rollout:
        self.samples += len(rollout.tokens)
        self.tokens += rollout.timings.generated_tokens
        self.form = rollout.timings.form
        return rollout

    def _warn(self, reason: str) -> None:
        """Say once why a call runs through transformers' own generate."""
        if reason not in self._warned:
            self._warned.add(reason)
            logger.warning("%s: using native generate, which is slower", reason)

    def _check(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        uids: Sequence[int],
        max_slots: int | None,
        limits: Sequence[int],
    ) -> None:
        require_decoder_only(self._model)
        if len(uids) != len(prompts):
            raise ConfigError(f"rollout: {len(uids)} uids for {len(prompts)} prompts")
        if max_slots is not None and max_slots < 1:
            raise ConfigError(f"max_slots is {max_slots}: give at least 1")
        check_suppressed(params, self._model.output_vocabulary)
        bounds = {
            "the model's positions": self.capability.max_positions,
            "hybrid_engine.max_out_tokens": self._settings.max_out_tokens,
        }
        prompt, limit = max(zip(map(len, prompts), limits, strict=True), key=sum, default=(0, 0))
        cut = limit != params.max_new_tokens
        check_length(prompt, limit, bounds, "a limit of" if cut else "max_new_tokens")


def _layers_of(owner: weakref.ref[Generator]) -> Callable[[], tuple[LayerShape, ...]]:
    """Not through a bound method: in a reference cycle, device memory waits for the collector."""

    def layers() -> tuple[LayerShape, ...]:
        generator = owner()
        assert generator is not None
        return generator.capability.layers

    return layers
