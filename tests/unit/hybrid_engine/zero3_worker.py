"""Run by test_zero3.py under torchrun: ZeRO-3 rollouts beside plain torch and transformers.

Usage: zero3_worker.py CHECK...  Rank 0 prints "ok CHECK" once every rank has passed it; any
failure exits non-zero.
"""

from __future__ import annotations

import copy
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
import transformers as tf

from rlhf_app.commands.worker import leave
from rlhf_app.errors import ConfigError
from rlhf_app.hybrid_engine import HybridEngine, SamplingParams, initialize
from rlhf_app.training.distributed import Dist, setup
from rlhf_app.training.saving import save_causal_lm

LAYERS = 5
GROUP = 2  # layers gathered at a time: the last group is a smaller one
PADDED = [[5, 6, 7], [9], [11, 12, 13, 14], [15, 16]]
LAYOUTS: dict[str, dict[str, Any]] = {
    # Matrices are split, biases and norms stay whole: as in a large model.
    "usual": {"stage3_param_persistence_threshold": 40},
    # Everything is split and let go at once; what comes next is fetched ahead.
    "strict": {
        "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0,
        "stage3_prefetch_bucket_size": 2000,
    },
}  # fmt: skip


def llama(
    tied: bool = True, layers: int = LAYERS, positions: int = 64, **rope: Any
) -> tf.PreTrainedModel:
    torch.manual_seed(0)
    config = tf.LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=positions,
        initializer_range=0.25, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        tie_word_embeddings=tied,
        rope_parameters={"rope_theta": 1e4, "rope_type": "default"} | rope,
    )  # fmt: skip
    return tf.LlamaForCausalLM(config)


def with_lora(model: tf.PreTrainedModel) -> tf.PreTrainedModel:
    torch.manual_seed(1)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"])
    return peft.inject_adapter_in_model(config, model)


def engine_of(
    model: tf.PreTrainedModel, *, pinned: bool = True, layout: str = "usual", stage: int = 3,
    lr: float = 0.01, enabled: bool = True, group: int = GROUP,
) -> HybridEngine:  # fmt: skip
    trained = [p for p in model.parameters() if p.requires_grad]
    return initialize(
        model=model,
        optimizer=torch.optim.AdamW(trained, lr=lr),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": stage, **LAYOUTS[layout]},
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 1.0,
            "hybrid_engine": {
                "enabled": enabled, "pin_parameters": pinned, "tp_gather_partition_size": group,
            },
        },
    )[0]  # fmt: skip


def batch_of(rank: int, step: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(3, 97, (2, 6), generator=draw)


class Plain:
    """The same training without DeepSpeed: the batches of all ranks on each rank."""

    def __init__(self, model: tf.PreTrainedModel, lr: float = 0.01) -> None:
        self.model = copy.deepcopy(model)
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=lr)

    def step(self, step: int) -> list[float]:
        losses = []
        for rank in range(dist.get_world_size()):
            batch = batch_of(rank, step)
            loss = self.model(input_ids=batch, labels=batch).loss
            (loss / dist.get_world_size()).backward()
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return losses

    def greedy(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        """transformers' own generate, left-padded; EOS is never drawn."""
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        out = self.model.generate(
            ids, attention_mask=mask, max_new_tokens=new_tokens, min_new_tokens=new_tokens,
            do_sample=False, suppress_tokens=[2],
        )  # fmt: skip
        return out[:, longest:].tolist()


def train(engine: HybridEngine, step: int) -> float:
    batch = batch_of(dist.get_rank(), step)
    loss = engine(input_ids=batch, labels=batch).loss
    engine.backward(loss)
    engine.step()
    return loss.item()


def mine() -> list[list[int]]:
    """Ranks differ in the number of prompts."""
    return PADDED[dist.get_rank() :]


def held(engine: HybridEngine) -> list[tuple[str, int, int, int]]:
    """Of every parameter: state, bytes on this rank, address and content of its shard."""
    return [
        (p.ds_status.name, p.untyped_storage().nbytes(), p.ds_tensor.data_ptr(),
         hash(p.ds_tensor.numpy().tobytes()))
        for p in engine.module.parameters()
    ]  # fmt: skip


def hooks(engine: HybridEngine) -> list[list[int]]:
    return [
        list(table)
        for module in engine.module.modules()
        for table in (module._forward_pre_hooks, module._forward_hooks)
    ]


GREEDY = SamplingParams(8, greedy=True, suppress_ids=(2,))


def check_tokens(pinned: bool) -> None:
    """Greedy tokens are transformers' own after each plain step, sampled ones those of ZeRO-0."""
    for layout, tied in (("usual", False), ("strict", True)):
        plain = Plain(llama(tied))
        engine = engine_of(llama(tied), pinned=pinned, layout=layout)
        zero0 = engine_of(llama(tied), stage=0)
        seen, in_flight = [], False
        for step in range(3):
            engine.eval()
            before, order = held(engine), hooks(engine)
            got = engine.rollout(mine(), GREEDY)
            assert got.tokens == plain.greedy(mine(), 8), (layout, tied, step)
            seen.append(got.tokens)
            sampling = SamplingParams(12, temperature=1.3, stop_ids=(2, 7, 9), seed=step)
            sampled = engine.rollout(mine(), sampling)
            expected = zero0.rollout(mine(), sampling)
            assert sampled.tokens == expected.tokens
            assert sampled.stopped == expected.stopped
            torch.testing.assert_close(sampled.logprobs, expected.logprobs)
            assert held(engine) == before, "memory or weights changed"
            assert hooks(engine) == order
            # A forward without backward may leave weights in flight.
            with torch.no_grad():
                engine(input_ids=batch_of(dist.get_rank(), 99))
            in_flight |= any(p.ds_status.name == "INFLIGHT" for p in engine.module.parameters())
            assert engine.rollout(mine(), GREEDY).tokens == got.tokens
            engine.train()
            zero0.train()
            # Twice in a row: now DeepSpeed knows the order of a forward with its backward, and
            # fetches for a backward also where none will follow.
            for half in (2 * step, 2 * step + 1):
                train(zero0, half)
                train(engine, half)
                plain.step(half)
        assert seen[0] != seen[1] != seen[2], "tokens did not follow the updates"
        assert any(state == "NOT_AVAILABLE" for state, *_ in before)
        assert in_flight or layout != "strict"


def check_lengths(pinned: bool) -> None:
    """Rank 0 stops after 3 tokens with one prompt, rank 1 after 50 with four; then the reverse."""
    engine = engine_of(llama(), pinned=pinned)
    plain = Plain(llama())
    for long_rank in (1, 0):
        is_long = dist.get_rank() == long_rank
        prompts = PADDED if is_long else PADDED[:1]
        count = 50 if is_long else 3
        params = SamplingParams(count, greedy=True, suppress_ids=(2,))
        slots = 2 if is_long else None  # refills in the middle, too
        got = engine.rollout(prompts, params, max_slots=slots).tokens
        assert got == plain.greedy(prompts, count)
        ids = torch.tensor([prompts[0]])
        out = engine.generate(ids, max_new_tokens=count, suppress_tokens=[2])
        assert out[0, 3:].tolist() == got[0]
    train(engine, 0)


def check_soak(pinned: bool) -> None:
    """LoRA over a frozen base with gradient checkpointing; losses are those of plain torch."""
    switches = 100 if pinned else 24
    for layout in LAYOUTS:
        model, lr = with_lora(llama(layers=GROUP)), 2e-3
        plain = Plain(model, lr)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        engine = engine_of(model, pinned=pinned, layout=layout, lr=lr, group=1)
        frozen = {
            name: p.ds_tensor.clone() for name, p in model.named_parameters() if not p.requires_grad
        }
        assert 0 < len(frozen) < len(list(model.parameters()))
        seen: set[str] = set()
        workspaces: set[int] = set()
        for step in range(switches // len(LAYOUTS)):
            engine.eval()
            before = held(engine)
            got = engine.rollout(mine(), SamplingParams(4, stop_ids=(2,), seed=step))
            seen.add(str(got.tokens))
            assert held(engine) == before
            with torch.no_grad():
                engine(input_ids=batch_of(dist.get_rank(), step))
            engine.train()
            expected = plain.step(step)[dist.get_rank()]
            assert train(engine, step) == pytest.approx(expected, abs=1e-4), step
            workspaces.add(engine.generator.workspace_bytes)
        assert len(seen) > 5
        assert len(workspaces) == 1, "the KV workspace changed its size"
        for name, p in model.named_parameters():
            if not p.requires_grad:
                assert torch.equal(p.ds_tensor, frozen[name]), f"{name} is frozen but changed"
        greedy = engine.rollout(mine(), SamplingParams(6, greedy=True, suppress_ids=(2,)))
        assert greedy.tokens == plain.greedy(mine(), 6)


def check_hooks(pinned: bool) -> None:
    """Other people's hooks fire in rollouts; DeepSpeed's do not, and are back afterwards."""
    engine = engine_of(llama(), pinned=pinned)
    layers = engine.module.model.layers
    calls: list[str] = []
    layers[0].register_forward_pre_hook(lambda *_: calls.append("pre"), prepend=True)
    layers[-1].register_forward_hook(lambda *_: calls.append("post"))
    gone = layers[1].register_forward_hook(lambda *_: calls.append("gone"))
    order = hooks(engine)
    fetched: list[object] = []
    offload = engine.optimizer.parameter_offload
    fetch = offload.pre_sub_module_forward_function
    offload.pre_sub_module_forward_function = lambda m: (fetched.append(m), fetch(m))[1]
    layers[2].register_forward_hook(lambda *_: gone.remove())  # in the middle of a rollout
    new_order = hooks(engine)
    engine.rollout([[3, 4]], SamplingParams(4, greedy=True, suppress_ids=(2,)))
    assert calls.count("pre") == calls.count("post") >= 4
    assert calls.count("gone") < calls.count("pre")
    assert not fetched
    assert hooks(engine) == [[k for k in table if k != gone.id] for table in new_order] != order
    train(engine, 0)
    assert fetched


def check_exception(pinned: bool) -> None:
    """An error inside a forward leaves nothing gathered and training as it would have been."""
    engine, plain = engine_of(llama(), pinned=pinned), Plain(llama())
    for step, layer in enumerate((0, 3, LAYERS - 1)):
        engine.eval()
        engine.rollout(mine(), GREEDY)
        before, order = held(engine), hooks(engine)

        def fail(*_: object) -> None:
            raise ZeroDivisionError

        handle = engine.module.model.layers[layer].register_forward_hook(fail)
        with pytest.raises(ZeroDivisionError):
            engine.rollout(mine(), GREEDY)
        handle.remove()
        assert held(engine) == before
        assert hooks(engine) == order
        assert engine.rollout(mine(), GREEDY).tokens == plain.greedy(mine(), 8)
        engine.train()
        train(engine, step)
        plain.step(step)
    assert engine.rollout(mine(), GREEDY).tokens == plain.greedy(mine(), 8)


@contextmanager
def failing(target: Any, name: str, error: Exception) -> Iterator[None]:
    def fail(*_: object) -> None:
        raise error

    kept = vars(target).get(name)
    setattr(target, name, fail)
    try:
        yield
    finally:
        delattr(target, name) if kept is None else setattr(target, name, kept)


def check_native_on_one_rank(pinned: bool) -> None:
    """What one rank's rows need transformers for, all ranks ask transformers for."""
    engine, plain = engine_of(llama(), pinned=pinned), Plain(llama())
    rank = dist.get_rank()
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
    whole, right = torch.ones_like(ids), torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    for _ in range(2):
        for mask, beams in (((whole, right)[rank], 1), (whole, 2 - rank)):
            arguments = {"max_new_tokens": 6, "num_beams": beams, "suppress_tokens": [2]}
            got = engine.generate(ids, mask, **arguments)
            want = plain.model.generate(ids, attention_mask=mask, **arguments)
            assert torch.equal(got, want)
        assert engine.rollout(mine(), GREEDY).tokens == plain.greedy(mine(), 8)
    # Dynamic positions: rows beyond 16 tokens, on rank 0 alone.
    rope: dict[str, Any] = {"positions": 16, "rope_type": "dynamic", "factor": 2.0}
    engine, plain = engine_of(llama(**rope), pinned=pinned), Plain(llama(**rope))
    for short in (3, 5):
        prompts = [[20 + i for i in range(short if rank else 12)], [7] * short]
        got = engine.rollout(prompts, GREEDY)
        assert got.tokens == [plain.greedy([prompt], 8)[0] for prompt in prompts]
        assert got.timings.form == "native"


def check_requests_apart(pinned: bool) -> None:
    """An error of one rank is one of all, a rank without prompts is none; no step is lost."""
    engine, plain = engine_of(llama(), pinned=pinned), Plain(llama())
    rank = dist.get_rank()
    before = held(engine)
    for bad in (0, 1):
        prefix = "" if rank == bad else f"on rank {bad}: "
        requests = {
            "a prompt of 70 tokens": [[5] * 70], "prompt 0 is empty": [[]],
        }  # fmt: skip
        for text, prompts in requests.items():
            with pytest.raises(ConfigError, match=f"^{prefix}{text}"):
                engine.rollout(prompts if rank == bad else mine(), GREEDY)
            assert engine.rollout(mine(), GREEDY).tokens == plain.greedy(mine(), 8)
        mask = torch.tensor([[int(rank != bad)]])
        with pytest.raises(ConfigError, match=f"^{prefix}generate: row 0 of attention_mask"):
            engine.generate(torch.tensor([[5]]), mask, max_new_tokens=2)
        generator = engine.generator
        for place, method, error, other in (
            (generator._memory, "borrow", RuntimeError("no room"), "no room"),
            (generator, "_check", TypeError("odd"), "TypeError: odd"),
        ):
            if rank == bad:
                with (
                    failing(place, method, error),
                    pytest.raises(type(error), match=f"^{error}$"),
                ):
                    engine.rollout(mine(), GREEDY)
            else:
                with pytest.raises(RuntimeError, match=f"^{prefix}{other}$"):
                    engine.rollout(mine(), GREEDY)
        for params in (GREEDY, SamplingParams(3, seed=2)):
            nothing = engine.rollout([] if rank == bad else mine(), params)
            assert len(nothing.tokens) == (0 if rank == bad else len(mine()))
            assert params is not GREEDY or nothing.tokens in ([], plain.greedy(mine(), 8))
    with pytest.raises(ConfigError, match="no prompts were given"):
        engine.rollout([], GREEDY)
    assert held(engine) == before
    native = engine_of(llama(), pinned=pinned, enabled=False)
    answers = native.rollout([] if rank else mine(), GREEDY).tokens
    assert answers == ([] if rank else plain.greedy(mine(), 8))
    # Where weights are whole anyway a rank may call alone.
    alone = engine_of(llama(), stage=0)
    if rank == 0:
        assert alone.rollout(mine(), GREEDY).tokens == plain.greedy(mine(), 8)
        with pytest.raises(ConfigError, match=r"^rollout: no prompts were given"):
            alone.rollout([], GREEDY)


def check_failure_on_one_rank(pinned: bool) -> None:
    """An error in the middle ends the rollout on every rank, or where ranks do not wait for
    each other on its own rank alone; the next rollout works."""
    engine, plain = engine_of(llama(), pinned=pinned, layout="strict"), Plain(llama())
    rank = dist.get_rank()
    model, state = engine.module, engine.generator._memory.state
    count = 8 if rank == 0 else 4  # rank 1 has nothing left to do while rank 0 goes on
    params = SamplingParams(count, greedy=True, suppress_ids=(2,))

    def rollout() -> None:
        assert engine.rollout(mine(), params).tokens == plain.greedy(mine(), count)

    def fails(bad: int) -> None:
        if rank == bad:
            with pytest.raises(ZeroDivisionError, match=r"^in this test$"):
                rollout()
        elif pinned:
            rollout()
        else:
            text = f"^rank {bad} failed in this rollout: ZeroDivisionError: in this test$"
            with pytest.raises(RuntimeError, match=text):
                rollout()

    rollout()
    before, order = held(engine), hooks(engine)
    error = ZeroDivisionError("in this test")
    modules = [model.model.embed_tokens, *model.model.layers, model.lm_head, model]
    for index, module in enumerate(modules):
        bad, left = index % 2, [index % 3]  # in the first forward or a later one

        def hook(*_: object, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise error

        handles = [module.register_forward_hook(hook)] if rank == bad else []
        fails(bad)
        for handle in handles:
            handle.remove()
        assert held(engine) == before
        assert hooks(engine) == order
        rollout()
    # Before the first forward, between two, and when the others have come to an end.
    for name in ("begin", "admit", "record", "answers"):
        for bad in (0, 1):
            with failing(state, name, error) if rank == bad else nullcontext():
                if name != "answers":
                    fails(bad)
                elif rank == bad:
                    with pytest.raises(ZeroDivisionError):
                        rollout()
                else:
                    rollout()
            rollout()
    engine.train()
    train(engine, 0)
    plain.step(0)
    rollout()


def check_streaming() -> None:
    """Never more than one group of layers at a time; traffic as counted by hand."""
    engine = engine_of(llama(), pinned=False, layout="strict")
    layers = engine.module.model.layers
    engine.rollout([[3]], SamplingParams(1))  # the probe's forwards are not counted below
    sizes = [[p.ds_numel for p in layer.parameters()] for layer in layers]
    most: list[int] = []
    forwards: list[int] = []

    def look(index: int) -> Callable[..., None]:
        def hook(*_: object) -> None:
            whole = [i for i, x in enumerate(layers) if all(p.numel() for p in x.parameters())]
            first = index // GROUP * GROUP
            assert whole == list(range(first, min(first + GROUP, LAYERS)))
            most.append(len(whole))

        return hook

    for index, layer in enumerate(layers):
        layer.register_forward_hook(look(index))
    engine.module.register_forward_hook(lambda *_: forwards.append(1))
    start = engine.weights.gathered_bytes
    # Rank 1 runs fewer forwards of its own: it takes part in those of rank 0.
    tokens = 9 - 4 * dist.get_rank()
    engine.rollout([[3, 4, 5]], SamplingParams(tokens, greedy=True, suppress_ids=(2,)))
    assert max(most) == GROUP
    assert len(forwards) == tokens
    layer_bytes = 4 * sum(map(sum, sizes))
    outside = 4 * (97 * 32 + 32)  # tied embedding and last norm, once
    assert engine.weights.gathered_bytes - start == outside + 9 * layer_bytes


def check_native(caplog: list[str]) -> None:
    """transformers' generate on ranks that stop at different lengths; one warning if unpinned."""
    for pinned in (True, False):
        engine = engine_of(llama(), pinned=pinned, enabled=False)
        plain = Plain(llama())
        caplog.clear()
        for step in range(2):
            before = held(engine)
            count = 3 + 12 * dist.get_rank()
            params = SamplingParams(count, greedy=True, suppress_ids=(2,))
            assert engine.rollout(mine(), params).tokens == plain.greedy(mine(), count)
            ids = torch.tensor([[5, 6, 7]])
            out = engine.generate(ids, max_new_tokens=count, num_beams=2)
            want = plain.model.generate(ids, max_new_tokens=count, num_beams=2)
            assert torch.equal(out, want)
            assert held(engine) == before
            train(engine, step)
            plain.step(step)
        warned = [line for line in caplog if "pin_parameters" in line]
        assert len(warned) == (0 if pinned else 1)


def check_saving(place: Dist) -> None:
    """After rollouts and steps the artifact holds the trained weights."""
    engine, plain = engine_of(llama(), layout="strict"), Plain(llama())
    for step in range(2):
        engine.rollout(mine(), GREEDY)
        train(engine, step)
        plain.step(step)
    engine.rollout(mine(), GREEDY)
    paths: list[Any] = [tempfile.mkdtemp()]
    dist.broadcast_object_list(paths)
    save_causal_lm(engine, _NoTokenizer(), Path(paths[0]) / "actor", place)
    loaded = tf.AutoModelForCausalLM.from_pretrained(Path(paths[0]) / "actor")
    for (name, got), want in zip(loaded.named_parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5, msg=name)
    answers = engine.rollout(mine(), GREEDY).tokens
    assert answers == plain.greedy(mine(), 8)
    # DeepSpeed's own checkpoint, taken right after a rollout and loaded right after one.
    engine.save_checkpoint(paths[0], tag="now")
    other = engine_of(llama(), layout="strict")
    assert other.rollout(mine(), GREEDY).tokens != answers
    other.load_checkpoint(paths[0], tag="now")
    assert other.rollout(mine(), GREEDY).tokens == answers
    assert train(other, 2) == train(engine, 2)


class _NoTokenizer:
    pad_token_id = 0

    def save_pretrained(self, path: Path) -> None:
        """Nothing to save."""


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def main() -> None:
    place = setup()
    lines = _Lines()
    logging.getLogger("rlhf_app").addHandler(lines)
    checks: dict[str, Callable[[], None]] = {
        "streaming": check_streaming,
        "native": lambda: check_native(lines.lines),
        "saving": lambda: check_saving(place),
    }
    for name, check in {
        "tokens": check_tokens, "lengths": check_lengths, "soak": check_soak,
        "hooks": check_hooks, "exception": check_exception,
        "native_on_one_rank": check_native_on_one_rank, "requests_apart": check_requests_apart,
        "failure_on_one_rank": check_failure_on_one_rank,
    }.items():  # fmt: skip
        checks[f"{name}-pinned"] = lambda check=check: check(True)
        checks[f"{name}-unpinned"] = lambda check=check: check(False)
    for name in sys.argv[1:] or checks:
        start = time.perf_counter()
        checks[name]()
        place.barrier()
        if place.is_main:
            print(f"ok {name} {time.perf_counter() - start:.1f} s", flush=True)


if __name__ == "__main__":
    # A hang must end as an error, not with the launcher's patience.
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    main()
    leave(0)
