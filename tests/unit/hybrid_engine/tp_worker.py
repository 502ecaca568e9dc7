"""Run by test_tensor_parallel.py under torchrun: one rank of tensor-parallel rollouts.

Usage: tp_worker.py CHECK...  Prints "ok CHECK" from rank 0; any failure exits non-zero.
Expected answers come from transformers' own generate on a plain copy of the model.
"""

from __future__ import annotations

import copy
import gc
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
import transformers as tf
from conftest import build_model

from rlhf_app.commands.worker import leave
from rlhf_app.errors import ConfigError
from rlhf_app.hybrid_engine import Generator, HybridEngine, Rollout, SamplingParams, initialize
from rlhf_app.hybrid_engine import attention as attention_module
from rlhf_app.hybrid_engine import sampling as sampling_module
from rlhf_app.hybrid_engine.tensor_parallel import SlicedWeights, shared_out
from rlhf_app.hybrid_engine.weights import ResidentWeights

NEW_TOKENS = 10
EOS = 2
GREEDY = SamplingParams(NEW_TOKENS, greedy=True, stop_ids=(EOS,))
SAMPLED = SamplingParams(NEW_TOKENS, seed=3, step=1, stop_ids=(EOS, 5, 6, 7, 8, 9))


def engine_on(model: tf.PreTrainedModel, stage: int, **hybrid: Any) -> HybridEngine:
    engine, *_ = initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
        config={
            "train_micro_batch_size_per_gpu": 2,
            # Every weight is split, however small.
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "zero_allow_untested_optimizer": True,
            "hybrid_engine": {
                "enabled": True, "inference_tp_size": 2, "tp_gather_partition_size": 2, **hybrid,
            },
        },
    )  # fmt: skip
    return engine


def my_prompts() -> list[list[int]]:
    """Ranks differ in number and in lengths; one prompt has one token."""
    rank = dist.get_rank()
    prompts = [[5 + rank, 6, 7], [9], [11, 12, 13, 14, 15 + rank, 16, 17], [30, 31]]
    return prompts[: 4 - rank]


def native_greedy(model: tf.PreTrainedModel, prompts: Sequence[list[int]]) -> list[list[int]]:
    """One prompt at a time, so without any padding."""
    answers = []
    for prompt in prompts:
        out = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            generation_config=tf.GenerationConfig(
                max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=EOS, pad_token_id=0
            ),
        )  # fmt: skip
        answers.append(out[0, len(prompt) :].tolist())
    return answers


@torch.no_grad()
def training_logits(model: tf.PreTrainedModel, prompt: list[int], answer: list[int]) -> Any:
    """[T, V] fp32 logits that predict each answer token."""
    ids = torch.tensor([prompt + answer])
    return model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, len(prompt) - 1 : -1]


def compare(
    model: tf.PreTrainedModel, prompts: list[list[int]], got: Rollout, want: list[list[int]]
) -> None:
    """Tokens equal, or parting where the two candidates are within rounding of each other."""
    assert len(got.tokens) == len(prompts)
    for prompt, answer, logprobs, expected in zip(
        prompts, got.tokens, got.logprobs, want, strict=True
    ):
        logits = training_logits(model, prompt, answer)
        their = logits.log_softmax(-1)[torch.arange(len(answer)), torch.tensor(answer)]
        assert (logprobs - their).abs().max() < 1e-4
        if answer != expected:
            pairs = enumerate(zip(answer, expected, strict=False))
            at = next(i for i, (a, b) in pairs if a != b)
            assert (logits[at, answer[at]] - logits[at, expected[at]]).abs() < 1e-5


def update(engine: HybridEngine) -> None:
    engine.train()
    row = 20 + dist.get_rank()
    batch = torch.tensor([[5, 6, 7, 8], [row, 21, 22, 23]])
    engine.backward(engine(input_ids=batch, labels=batch).loss)
    engine.step()


def refresh(reference: tf.PreTrainedModel, model: tf.PreTrainedModel) -> None:
    """Copy the trained weights into the plain model."""
    with deepspeed.zero.GatheredParameters(list(model.parameters())), torch.no_grad():
        for mine, theirs in zip(reference.parameters(), model.parameters(), strict=True):
            mine.copy_(theirs)


def places(model: torch.nn.Module) -> list[Any]:
    """All that a rollout swaps: objects, addresses, sizes, attributes and hooks."""
    found: list[Any] = []
    for module in model.modules():
        for name, weight in module._parameters.items():
            found.append((name, id(weight), None if weight is None else weight.data_ptr()))
        found.append(sorted((k, v) for k, v in vars(module).items() if isinstance(v, int)))
        found.append(id(vars(module).get("config")))
        found.append((len(module._forward_hooks), len(module._forward_pre_hooks)))
    return found


def partitioned(model: torch.nn.Module) -> bool:
    return all(p.ds_status.name == "NOT_AVAILABLE" and p.numel() == 0 for p in model.parameters())


def check_family(family: str, stage: int) -> None:
    rank = dist.get_rank()
    model = build_model(family)
    if family == "qwen2":  # one weight at two places, neither of them cut
        model.config.tie_word_embeddings = True
        model.tie_weights()
    reference = copy.deepcopy(model)
    engine = engine_on(model, stage)
    weights = engine.weights
    assert isinstance(weights, SlicedWeights), family
    prompts = my_prompts()
    before = places(model)
    values = [p.detach().clone() for p in model.parameters()]
    greedy = []
    for _ in range(2):
        engine.eval()
        got = engine.rollout(prompts, GREEDY, max_slots=2)
        assert weights.group.size == 2
        compare(reference, prompts, got, native_greedy(reference, prompts))
        greedy.append(got.tokens)
        uids = [100 * rank + i for i in range(len(prompts))]
        sampled = engine.rollout(prompts, SAMPLED, uids)
        alone = Generator(reference).rollout(prompts, SAMPLED, uids)
        compare(reference, prompts, sampled, alone.tokens)
        assert engine.generator.form.endswith("| tensor parallel 2"), engine.generator.form
        if len(greedy) == 1:
            assert places(model) == before
            if stage == 3:
                assert partitioned(model)
            else:
                assert all(map(torch.equal, values, model.parameters()))
        update(engine)
        refresh(reference, model)
    assert greedy[0] != greedy[1], f"{family}: tokens did not follow the update"
    # The cache holds this rank's heads only (all of them where attention is not cut).
    whole = Generator(reference).capability.layers
    mine = engine.generator.capability.layers
    shared = 1 if family == "olmo2" else 2
    assert [s.kv_heads for s in whole] == [shared * s.kv_heads for s in mine]


def check_zero0() -> None:
    families = [
        "llama-mha", "llama", "qwen2", "mistral-window", "opt", "opt-350m", "gpt2", "codegen",
        "gpt-neox", "gemma2", "phi3", "olmo2", "mixtral",
    ]  # fmt: skip
    for family in families:
        check_family(family, 0)


def check_more_families() -> None:
    """Without DeepSpeed, and without an update."""
    prompts = my_prompts()
    for family in ["gptj", "qwen3", "gemma3", "phi", "smollm3", "llama3-rope", "qwen2-moe"]:
        model = build_model(family)
        generator = Generator(model, weights=shared_out(model, ResidentWeights(), 2, 8))
        got = generator.rollout(prompts, GREEDY)
        assert got.timings.form.endswith("| tensor parallel 2"), family
        compare(model, prompts, got, native_greedy(model, prompts))


def check_zero3() -> None:
    for family in ["llama", "qwen2", "mistral-window", "opt-350m", "gpt2", "phi3", "mixtral"]:
        check_family(family, 3)
        gc.collect()


def check_dsc07_left_padded_generate() -> None:
    """DeepSpeed gathered the ids of a group's ranks without their attention masks."""
    rank = dist.get_rank()
    for stage in (0, 3):
        model = build_model("llama")
        reference = copy.deepcopy(model)
        engine = engine_on(model, stage)
        engine.eval()
        rows = [[5, 6, 7], [9], [11, 12, 13, 14, 15]][rank:]
        longest = max(map(len, rows)) + rank  # ranks differ in padding as well
        # Padded with a token that also occurs in prompts: the mask alone says which counts.
        pad = 7
        ids = torch.tensor([[pad] * (longest - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
        arguments = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": pad}
        got = engine.generate(ids, mask, **arguments)
        want = reference.generate(ids, attention_mask=mask, **arguments)
        assert got.tolist() == want.tolist()
        # Each rank's own seed counts, as when it generates alone.
        torch.manual_seed(40 + rank)
        sampled = engine.generate(ids, mask, max_new_tokens=6, do_sample=True, top_k=0)
        torch.manual_seed(40 + rank)
        alone = Generator(reference).generate(ids, mask, max_new_tokens=6, do_sample=True, top_k=0)
        assert sampled.tolist() == alone.tolist()
        # What one rank's row needs transformers for, every rank asks transformers for.
        holes = mask.clone()
        if rank == 0:
            holes[0, -2] = 0
        with failing(engine.generator, "rollout", None):
            got = engine.generate(ids, holes, **arguments)
        assert got.tolist() == reference.generate(ids, attention_mask=holes, **arguments).tolist()
        assert engine.generate(ids, mask, **arguments).tolist() == want.tolist()


def check_dsc22_ranks_that_stop_apart() -> None:
    """Ranks with other numbers, lengths and ends of answers wait for nothing."""
    rank = dist.get_rank()
    model = build_model("llama")
    reference = copy.deepcopy(model)
    engine = engine_on(model, 3)
    engine.eval()
    free = Generator(reference)
    prompts = [[5, 6, 7], [9], [20, 21, 22, 23]] if rank == 0 else [[40 + rank, 41]]
    # Tokens that rank 0's answers reach at once, and rank 1's late or never.
    stops = tuple(answer[0] for answer in free.rollout([[5, 6, 7], [9]], GREEDY).tokens)
    params = SamplingParams(NEW_TOKENS, greedy=True, stop_ids=stops)
    for slots in (None, 1, 2):
        got = engine.rollout(prompts, params, max_slots=slots)
        assert got.tokens == free.rollout(prompts, params).tokens
        assert got.timings.generated_tokens == sum(map(len, got.tokens))
        assert got.timings.prompt_tokens == sum(map(len, prompts))
        # Limits are those of each rank's own prompts; slots are counted for both.
        limits = [4, 1, 9][: len(prompts)] if rank == 0 else [7]
        cut = engine.rollout(prompts, SAMPLED, max_slots=slots, limits=limits)
        assert cut.tokens == free.rollout(prompts, SAMPLED, limits=limits).tokens
        of_both = cut.timings.slot_steps // cut.timings.decode_steps
        assert of_both == (4 if slots is None else min(slots, 3) + 1)
    assert dist.get_world_size() == 2
    lengths: list[Any] = [None, None]
    dist.all_gather_object(lengths, list(map(len, got.tokens)))
    assert min(lengths[0]) == 1 < max(lengths[1])
    # A rank without prompts takes part in those of the others.
    mine = prompts if rank == 0 else []
    assert engine.rollout(mine, params).tokens == (
        free.rollout(mine, params).tokens if mine else []
    )


@contextmanager
def failing(target: Any, name: str, fail: Callable[..., Any]) -> Iterator[None]:
    kept = getattr(target, name)
    setattr(target, name, fail)
    try:
        yield
    finally:
        setattr(target, name, kept)


def check_errors() -> None:
    """An error before the first forward ends the call on all ranks, and the next one works."""
    rank = dist.get_rank()
    for stage in (0, 3):
        model = build_model("opt")
        reference = copy.deepcopy(model)
        engine = engine_on(model, stage)
        engine.eval()
        before = places(model)
        prompts = my_prompts()
        bad = [[5], []] if rank == 1 else prompts
        with pytest.raises(ConfigError, match="prompt 1 is empty"):
            engine.rollout(bad, GREEDY)
        mask = torch.tensor([[1 - rank]])
        with pytest.raises(ConfigError, match="attention_mask is all 0"):
            engine.generate(torch.tensor([[5]]), mask, max_new_tokens=2)
        with pytest.raises(ConfigError, match=r"temperature is 1.0 on rank 0 and 0.5 on rank 1"):
            engine.rollout(prompts, SamplingParams(4, temperature=0.5 if rank else 1.0))
        with pytest.raises(ConfigError, match="no prompts were given"):
            engine.rollout([], GREEDY)
        with pytest.raises(ConfigError, match="max_new_tokens is 3 on rank 0 and 4 on rank 1"):
            engine.rollout(prompts, SamplingParams(3 + rank))

        def no_room(*_: Any) -> Any:
            raise RuntimeError("no room in this test")

        def stop(*_: Any) -> Any:
            raise RuntimeError("stop in this test")

        def odd(*_: Any) -> Any:
            raise TypeError("odd in this test")

        if rank == 1:
            with (
                failing(engine.generator, "_check", odd),
                pytest.raises(TypeError, match=r"^odd"),
            ):
                engine.rollout(prompts, GREEDY)
        else:
            with pytest.raises(RuntimeError, match="on rank 1: TypeError: odd in this test"):
                engine.rollout(prompts, GREEDY)
        if rank == 0:
            with (
                failing(engine.generator._memory, "borrow", no_room),
                pytest.raises(RuntimeError, match=r"^no room"),
            ):
                engine.rollout(prompts, GREEDY)
        else:
            with pytest.raises(RuntimeError, match="on rank 0: no room"):
                engine.rollout(prompts, GREEDY)
        # In the middle of a forward, on all ranks: everything is put back.
        with (
            failing(attention_module.Prefill, "attend", stop),
            pytest.raises(RuntimeError, match="stop in this test"),
        ):
            engine.rollout(prompts, GREEDY)
        assert places(model) == before
        assert stage == 0 or partitioned(model)
        got = engine.rollout(prompts, GREEDY)
        compare(reference, prompts, got, native_greedy(reference, prompts))


def check_first_rank_decides() -> None:
    """A rank that draws another token, as rounding may make it, still follows the first."""
    model = build_model("llama")
    reference = copy.deepcopy(model)
    engine = engine_on(model, 0)
    engine.eval()
    prompts = my_prompts()
    engine.generator.capability  # noqa: B018 - probed with the sampler as it is
    kept = sampling_module.Sampler.__call__

    def differing(self: Any, logits: torch.Tensor, uniforms: torch.Tensor) -> Any:
        tokens, logprobs = kept(self, logits, uniforms)
        return (tokens + 1) % logits.shape[1], logprobs - 1

    with failing(sampling_module.Sampler, "__call__", differing if dist.get_rank() else kept):
        got = engine.rollout(prompts, GREEDY)
    compare(reference, prompts, got, native_greedy(reference, prompts))


class _Log(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextmanager
def warnings_of(name: str) -> Iterator[list[str]]:
    log = _Log()
    logging.getLogger(name).addHandler(log)
    try:
        yield log.lines
    finally:
        logging.getLogger(name).removeHandler(log)


def check_fallbacks() -> None:
    """What cannot be cut is said once and runs whole; so does what is cut wrongly."""
    prompts = my_prompts()
    reasons = {
        "bloom": "no tensor-parallel plan",
        "mpt": "no tensor-parallel plan",
        "one kv head": "4 attention and 1 key-value heads do not divide by 2",
        "lora": "LoRA adapters",
        "unsummed": "decoded logits equal to the training forward's",
    }
    for case, reason in reasons.items():
        model = build_model(case if case in ("bloom", "mpt") else "llama")
        if case == "one kv head":
            model.config.num_key_value_heads = 1
            model = tf.LlamaForCausalLM(model.config).eval()
        if case == "lora":
            from peft import LoraConfig, inject_adapter_in_model

            inject_adapter_in_model(LoraConfig(target_modules=["q_proj"]), model)
        reference = copy.deepcopy(model)
        with warnings_of("rlhf_app.hybrid_engine.tensor_parallel") as lines:
            engine = engine_on(model, 0)
            if case == "unsummed":
                assert isinstance(engine.weights, SlicedWeights)
                engine.weights._add_up = lambda module, args, output: output
            engine.eval()
            for _ in range(2):
                got = engine.rollout(prompts, GREEDY)
                compare(reference, prompts, got, native_greedy(reference, prompts))
        assert len(lines) == 1, (case, lines)
        assert reason in lines[0], (case, lines)
        assert "tensor parallel size 1" in lines[0]
        assert "tensor parallel" not in engine.generator.form


def check_bytes() -> None:
    """The planned bytes are those that a rollout holds."""
    for stage in (0, 3):
        model = build_model("gpt2")
        engine = engine_on(model, stage)
        weights = engine.weights
        assert isinstance(weights, SlicedWeights)
        h, layers, vocab, positions = 32, 3, 97, 64
        matrices = layers * 12 * h * h + layers * (3 * h + 4 * h)  # with c_attn's and c_fc's bias
        rest = 2 * vocab * h + positions * h + layers * (2 * h + 4 * h) + 2 * h
        assert weights.whole_bytes == 4 * (matrices + rest)
        assert weights.slice_bytes == 4 * (matrices // 2 + rest)
        fused = layers * (3 * h * h + 3 * h) // 2
        zeros = layers * 2 * h if dist.get_rank() else 0
        copied = matrices // 2 + rest if stage == 3 else fused + zeros
        assert weights.copied_bytes == 4 * copied
        stored = {p.untyped_storage().data_ptr() for p in model.parameters()}
        with weights.available():
            held = {id(p): p for m in model.modules() for p in m._parameters.values()}
            held.pop(id(None), None)
            assert sum(p.numel() * 4 for p in held.values()) == weights.slice_bytes
            new = {
                p.untyped_storage().data_ptr(): p.untyped_storage().nbytes()
                for p in held.values()
                if p.untyped_storage().data_ptr() not in stored
            }
            # ZeRO-3's collectives pad their buffers to whole shards.
            assert 0 <= sum(new.values()) - weights.copied_bytes <= (stage == 3) * 4 * 64
        assert engine.weights.gather_seconds >= 0


def check_groups() -> None:
    """Four ranks in two groups: each group has its own rows, ZeRO-3 gathers from all four."""
    rank = dist.get_rank()
    with pytest.raises(ConfigError, match=r"inference_tp_size is 3.* divide the 4 processes"):
        engine_on(build_model("llama"), 0, inference_tp_size=3)
    for family, stage in [("llama-mha", 0), ("gpt2", 3), ("llama", 3)]:
        model = build_model(family)
        reference = copy.deepcopy(model)
        engine = engine_on(model, stage, tp_gather_partition_size=1)
        prompts = [[5 + rank, 6, 7, 8][: 1 + rank], [30 + rank, 9]][: 2 - rank // 3]
        for _ in range(2):
            engine.eval()
            for params in (GREEDY, SAMPLED):
                got = engine.rollout(prompts, params)
                want = Generator(reference).rollout(prompts, params).tokens
                compare(reference, prompts, got, want)
            compare(
                reference, prompts, engine.rollout(prompts, GREEDY),
                native_greedy(reference, prompts),
            )  # fmt: skip
            update(engine)
            refresh(reference, model)
    # Weights come from all four ranks: what one of them cannot do, neither group does.
    with pytest.raises(ConfigError, match="prompt 0 is empty"):
        engine.rollout([[]] if rank == 3 else prompts, GREEDY)
    # So does what the ranks of one group do not agree on; and a whole group may have no prompts.
    with pytest.raises(ConfigError, match=r"max_new_tokens is 3 on rank 2 and 4 on rank 3"):
        engine.rollout(prompts, SamplingParams(2 if rank < 2 else 1 + rank))
    for idle in (0, 1):
        mine = [] if rank // 2 == idle else prompts
        got = engine.rollout(mine, GREEDY)
        compare(reference, mine, got, native_greedy(reference, mine))
    ids, mask = torch.tensor([[5, 6, 7]]), torch.tensor([[1, int(rank > 0), 1]])
    arguments = {"max_new_tokens": 4, "do_sample": False}
    got = engine.generate(ids, mask, **arguments)
    assert got.tolist() == reference.generate(ids, attention_mask=mask, **arguments).tolist()
    # Four ranks in one group of four.
    model = build_model("opt")
    reference = copy.deepcopy(model)
    engine = engine_on(model, 3, inference_tp_size=4)
    assert engine.weights.group.size == 4
    engine.eval()
    got = engine.rollout(prompts, GREEDY)
    compare(reference, prompts, got, native_greedy(reference, prompts))


def check_dsc21_soak() -> None:
    """50 switches between training and shared rollouts under ZeRO-3."""
    model = build_model("llama")
    engine = engine_on(model, 3)
    prompts = my_prompts()
    before = [id(p) for p in model.parameters()]
    for _ in range(50):
        engine.eval()
        engine.rollout(prompts, SAMPLED)
        assert partitioned(model)
        update(engine)
    assert before == [id(p) for p in model.parameters()]
    assert engine.global_steps == 50


def check_lost_rank() -> None:
    """Rank 1 fails in the middle of a rollout: this process must not wait for ever."""
    engine = engine_on(build_model("llama"), 0)
    engine.eval()
    engine.rollout(my_prompts(), GREEDY)
    print(f"failing at {time.time()}", flush=True)
    if dist.get_rank() == 1:
        steps = iter(range(3))
        kept = attention_module.Decode.attend

        def attend(self: Any, call: Any) -> Any:
            if call.layer == 1 and next(steps, None) is None:
                raise RuntimeError("lost in this test")
            return kept(self, call)

        attention_module.Decode.attend = attend
    engine.rollout(my_prompts(), GREEDY)


def main() -> None:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    for name in sys.argv[1:]:
        start = time.perf_counter()
        globals()[f"check_{name}"]()
        dist.barrier()
        if dist.get_rank() == 0:
            print(f"ok {name} {time.perf_counter() - start:.1f} s", flush=True)


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        logging.exception("rank %s", os.environ.get("RANK"))
        leave(1)
    leave(0)
