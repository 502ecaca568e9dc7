"""Kernels built by the machine's C++ compiler: what is built, when, and what they compute."""

import logging
import shutil
import subprocess
import sys

import pytest
import torch

from rlhf_app.config.schema import HybridEngineSettings
from rlhf_app.errors import ConfigError
from rlhf_app.hybrid_engine import Generator, SamplingParams
from rlhf_app.hybrid_engine.attention import AttentionCall
from rlhf_app.hybrid_engine.cpu_decode import CpuDecode
from rlhf_app.hybrid_engine.decode_step import COMPILED
from rlhf_app.hybrid_engine.ds_settings import parse_block
from rlhf_app.hybrid_engine.fused import compiled, compiled_decoder
from rlhf_app.hybrid_engine.fused.plan import read_plan
from rlhf_app.hybrid_engine.inference_model import InferenceModel
from rlhf_app.hybrid_engine.kv_workspace import KVWorkspace, LayerShape

needs_compiler = pytest.mark.skipif(compiled.find_compiler() is None, reason="no C++ compiler")
CPU = torch.device("cpu")
ON = HybridEngineSettings(compile_decode=True)
# Plans, other attention (softcap, windows, biases), adapters, positions outside the attention.
FAMILIES = [
    "opt", "opt-350m", "gpt2", "gpt-neox", "llama", "dynamic-rope", "qwen2-window", "gemma2",
    "phi3", "gpt-neo", "bloom", "falcon-alibi", "falcon-gqa", "mixtral",
]  # fmt: skip


@pytest.fixture
def fresh():
    """Builds are looked for anew, and so they are afterwards."""

    def forget():
        for kept in (compiled.find_compiler, compiled.load):
            kept.cache_clear()

    forget()
    yield
    forget()


@needs_compiler
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_transformers(family, build, prompts, hf_greedy, assert_same_greedy):
    model = build(family)
    # Those with scaled positions beyond what the engine serves go on natively.
    length = 4 if family == "dynamic-rope" else 14
    generator = Generator(model, ON)
    params = SamplingParams(length, greedy=True)
    want = hf_greedy(model, prompts, length)
    assert_same_greedy(model, prompts, generator.rollout(prompts, params, max_slots=7).tokens, want)
    assert generator.form == COMPILED


@needs_compiler
def test_samples_do_not_depend_on_slots_or_threads(build, prompts, monkeypatch):
    model = build("qwen3")
    params = SamplingParams(14, temperature=0.8, seed=5, stop_ids=(7, 8, 9))
    want = Generator(model, ON).rollout(prompts, params)
    assert len({len(tokens) for tokens in want.tokens}) > 3, "rows should end at many lengths"
    monkeypatch.setattr(compiled, "_WORTH_A_THREAD", 1)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for slots in (1, 5, 24):
            got = Generator(model, ON).rollout(prompts, params, max_slots=slots)
            assert got.tokens == want.tokens
            for mine, other in zip(got.logprobs, want.logprobs, strict=True):
                assert torch.equal(mine, other)
    finally:
        torch.set_num_threads(threads)


@needs_compiler
def test_weights_that_move_are_followed(build, prompts, hf_greedy):
    model = build("llama")
    generator = Generator(model, ON)
    params = SamplingParams(10, greedy=True)
    before = generator.rollout(prompts, params).tokens
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            old = module.weight
            module.weight = torch.nn.Parameter(old.detach().roll(1, 0))
            with torch.no_grad():
                old.fill_(float("nan"))  # whoever still reads it shows it
    assert generator.rollout(prompts, params).tokens == hf_greedy(model, prompts, 10) != before


@needs_compiler
@pytest.mark.parametrize("size", [8, 16, 24, 20, 32, 40, 64, 128])
def test_attention_in_double_precision(size):
    draw = torch.Generator().manual_seed(size)
    rows, heads, kv_heads, positions = 5, 6, 2, 48
    workspace = KVWorkspace([LayerShape(kv_heads, size, size)], torch.float32, CPU)
    workspace.borrow(rows + 2, positions)
    workspace.keys[0].normal_(generator=draw)
    workspace.values[0].normal_(generator=draw)
    slots, lengths = torch.tensor([3, 6, 0, 2, 5]), torch.tensor([0, 47, 16, 31, 5])
    keys, values = workspace.keys[0].double(), workspace.values[0].double()
    query = 3 * torch.randn((rows, 1, heads, size), generator=draw).transpose(1, 2)
    key, value = torch.randn((2, rows, kv_heads, 1, size), generator=draw)
    for window in (None, 1, 7):
        call = AttentionCall(0, query, key, value, None, 0.3, window, None, {})
        out = CpuDecode(compiled.load(), workspace, slots, lengths).attend(call)
        assert out.shape == (rows, heads, 1, size)
        for row, (slot, length) in enumerate(zip(slots.tolist(), lengths.tolist(), strict=True)):
            keys[slot, :, length], values[slot, :, length] = key[row, :, 0], value[row, :, 0]
            seen = slice(0 if window is None else max(0, length + 1 - window), length + 1)
            for head in range(heads):
                kv_head = head // (heads // kv_heads)
                logits = 0.3 * keys[slot, kv_head, seen] @ query[row, head, 0].double()
                want = torch.softmax(logits, 0) @ values[slot, kv_head, seen]
                torch.testing.assert_close(out[row, head, 0].double(), want, atol=2e-6, rtol=2e-5)
    torch.testing.assert_close(workspace.keys[0].double(), keys, atol=0, rtol=0)
    torch.testing.assert_close(workspace.values[0].double(), values, atol=0, rtol=0)


@needs_compiler
@pytest.mark.parametrize(("token", "position"), [(97, 3), (-1, 3), (5, 16), (5, -1)])
def test_ids_and_positions_out_of_range_are_errors(token, position, build):
    model = InferenceModel(build("llama"))
    workspace = KVWorkspace([LayerShape(2, 8, 8)] * 3, torch.float32, CPU)
    workspace.borrow(2, 16)
    model.kernels = compiled.load()
    with model.session():
        tokens, at = torch.tensor([5, token]), torch.tensor([3, position])
        step = CpuDecode(model.kernels, workspace, torch.arange(2), at)
        with pytest.raises(IndexError, match="beyond"):
            model.decode(tokens, at, step)
    if token == 5:
        zeros = torch.zeros(2, 4, 1, 8)
        call = AttentionCall(0, zeros, zeros[:, :2], zeros[:, :2], None, 1.0, None, None, {})
        with pytest.raises(IndexError, match="16 positions"):
            step.attend(call)
    assert not any(keys.any() for keys in workspace.keys)


@needs_compiler
def test_layers_beyond_the_caches_and_moving_rotations_keep_torch(build, monkeypatch):
    plan = read_plan(build("llama"))
    assert compiled_decoder.suits(plan)
    assert not compiled_decoder.suits(read_plan(build("dynamic-rope")))
    # 32 x (32 + 16 + 16 + 32) and 3 x 32 x 48 weights.
    monkeypatch.setattr(compiled_decoder, "LARGEST_LAYER", 3072 + 4608)
    assert compiled_decoder.suits(plan)
    monkeypatch.setattr(compiled_decoder, "LARGEST_LAYER", 3072 + 4608 - 1)
    assert not compiled_decoder.suits(plan)


def test_when_kernels_are_used(monkeypatch):
    monkeypatch.setattr(compiled, "load", lambda: "kernels")
    monkeypatch.setattr(compiled, "find_compiler", lambda: "g++")

    def ask(setting, tokens=2048, device="cpu", dtype=torch.float32):
        settings = HybridEngineSettings(compile_decode=setting)
        return compiled.kernels_for(settings, torch.device(device), dtype, tokens)

    assert [ask("auto"), ask("auto", 2047), ask(True, 1), ask(False)] == [
        "kernels", None, "kernels", None,
    ]  # fmt: skip
    assert ask(True, dtype=torch.bfloat16) is None
    assert ask(True, device="cuda") is None
    monkeypatch.setattr(compiled, "find_compiler", lambda: None)
    assert ask("auto") is None


@pytest.mark.parametrize("compiler", ["false", "nothing-of-this-name"])
def test_no_build_is_one_warning(
    compiler, build, prompts, hf_greedy, monkeypatch, tmp_path, fresh, warnings_of
):
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = build("llama")
    with warnings_of() as warned:
        for _ in range(2):
            generator = Generator(model, ON)
            got = generator.rollout(prompts, SamplingParams(6, greedy=True)).tokens
            assert got == hf_greedy(model, prompts, 6)
            assert "eager" in generator.form
    assert len(warned) == 1
    assert "without compiled kernels" in warned[0]
    assert not list(tmp_path.rglob("*.so"))


@needs_compiler
@pytest.mark.slow
def test_a_build_is_made_once(monkeypatch, tmp_path, fresh, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with caplog.at_level(logging.INFO, logger=compiled.logger.name):
        assert compiled.load() is not None
        (built,) = tmp_path.rglob("*.so")
        made = built.stat().st_mtime_ns
        compiled.load.cache_clear()
        assert compiled.load() is not None
    texts = [record.getMessage() for record in caplog.records]
    assert ["built in" in text for text in texts] == [True, False]
    assert built.stat().st_mtime_ns == made
    # Another process finds it too.
    code = "from rlhf_app.hybrid_engine.fused.compiled import load; assert load()"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert list(tmp_path.rglob("*.so")) == [built]
    assert built.stat().st_mtime_ns == made
    # Another source is another build.
    edited = shutil.copytree(compiled._SOURCES, tmp_path / "cpu")
    (edited / "forward.h").write_text("// edited\n" + (edited / "forward.h").read_text())
    monkeypatch.setattr(compiled, "_SOURCES", edited)
    compiled.load.cache_clear()
    assert compiled.load() is not None
    assert len(list(tmp_path.rglob("*.so"))) == 2


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("size", [0, 31_040], ids=["empty", "cut short"])
def test_a_damaged_build_is_made_anew(monkeypatch, tmp_path, fresh, size):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert compiled.load() is not None
    (built,) = tmp_path.rglob("*.so")
    whole = built.read_bytes()
    built.unlink()  # this process has it mapped: a truncation would reach there
    built.write_bytes(whole[:size])
    compiled.load.cache_clear()

    assert compiled.load() is not None

    assert [path.read_bytes() != whole[:size] for path in tmp_path.rglob("*.so")] == [True]


def test_a_compiler_that_makes_nothing_is_one_warning(monkeypatch, tmp_path, fresh, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "/bin/true")
    compiled.find_compiler.cache_clear()
    with caplog.at_level(logging.WARNING, logger=compiled.logger.name):
        assert compiled.load() is None
    assert "made an empty file" in caplog.text
    assert not list(tmp_path.rglob("*.so"))
    compiled.find_compiler.cache_clear()


def test_the_setting_in_a_deepspeed_block():
    assert parse_block({"enabled": True}).compile_decode == "auto"
    for value in ("auto", True, False):
        assert parse_block({"compile_decode": value}).compile_decode is value
    with pytest.raises(ConfigError, match=r"hybrid_engine\.compile_decode"):
        parse_block({"compile_decode": "sometimes"})


def _transposed(weight):
    return weight.t().contiguous().t()


def _part_of_wider(weight):
    wide = torch.cat([weight, torch.zeros_like(weight)], dim=1)
    return wide[:, : weight.shape[1]]


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("setting", [True, False])
@pytest.mark.parametrize("layout", [_transposed, _part_of_wider])
@pytest.mark.parametrize("name", ["lm_head", "model.layers.0.self_attn.q_proj"])
def test_weights_in_another_layout_are_followed(layout, name, setting, build, prompts, hf_greedy):
    model = build("llama")
    generator = Generator(model, HybridEngineSettings(compile_decode=setting))
    generator.rollout(prompts, SamplingParams(4, greedy=True))
    weight = model.get_submodule(name).weight
    weight.data = layout(weight.data * -1.0)

    got = generator.rollout(prompts, SamplingParams(8, greedy=True)).tokens

    assert got == hf_greedy(model, prompts, 8)
