"""GGUF files by llama.cpp's own package, beside the same weights in plain transformers."""

from __future__ import annotations

import copy
import json
import sys

import numpy as np
import pytest
import torch
import transformers as tf

from rlhf_app.config.load import load_config as load_run_config
from rlhf_app.config.load import parse_set
from rlhf_app.errors import ConfigError
from rlhf_app.fingerprint import content_hash
from rlhf_app.models import gguf_files
from rlhf_app.models.chat_format import ChatFormat
from rlhf_app.models.load import eos_token_ids, generation_eos_ids, load_causal_lm
from rlhf_app.models.load import load_config as load_model_config
from rlhf_app.models.scalar_head import load_scalar_model, new_scalar_model
from rlhf_app.models.shapes import model_positions, model_shape
from rlhf_app.models.tokenizer import load_tokenizer
from rlhf_app.preflight import check_inputs
from rlhf_app.run_directory import RunDirectory

gguf = pytest.importorskip("gguf")

CPU = torch.device("cpu")
FP32 = {"dtype": torch.float32, "device": CPU}
SPECIAL = ("<unk>", "<|im_start|>", "<|im_end|>", "<pad>")
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HEADS, KV_HEADS = 4, 2


def byte_alphabet() -> list[str]:
    """GPT-2's printable stand-ins of the 256 bytes, in byte order (Radford et al. 2019)."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in shown]
    return [chr(b) if b in shown else chr(256 + hidden.index(b)) for b in range(256)]


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp's order of query and key rows: rotary halves of a head take turns."""
    rows, columns = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, columns)
    return halves.transpose(1, 2).reshape(rows, columns)


def write_gguf(model, path, quantised: bool = False) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    config = model.config
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*SPECIAL, *byte_alphabet(), "he"])
    writer.add_token_types([3] * len(SPECIAL) + [1] * 257)
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(3)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    for name, value in model.state_dict().items():
        if name == "lm_head.weight":
            continue  # tied
        value = value.float()
        if "q_proj" in name or "k_proj" in name:
            value = interleaved(value, HEADS if "q_proj" in name else KV_HEADS)
        short = name.replace("model.layers.", "blk.").replace("model.embed_tokens", "token_embd")
        for theirs, ours in (
            ("self_attn.q_proj", "attn_q"), ("self_attn.k_proj", "attn_k"),
            ("self_attn.v_proj", "attn_v"), ("self_attn.o_proj", "attn_output"),
            ("mlp.gate_proj", "ffn_gate"), ("mlp.up_proj", "ffn_up"), ("mlp.down_proj", "ffn_down"),
            ("post_attention_layernorm", "ffn_norm"), ("input_layernorm", "attn_norm"),
            ("model.norm", "output_norm"),
        ):  # fmt: skip
            short = short.replace(theirs, ours)
        array = value.numpy().astype(np.float32)
        if quantised and array.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(short, gguf.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(short, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def plain_model():
    torch.manual_seed(0)
    return tf.LlamaForCausalLM(
        tf.LlamaConfig(
            vocab_size=len(SPECIAL) + 257, hidden_size=32, intermediate_size=64,
            num_hidden_layers=2, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS,
            max_position_embeddings=64, rms_norm_eps=1e-5, tie_word_embeddings=True,
            initializer_range=0.2,
        )
    ).eval()  # fmt: skip


@pytest.fixture(scope="module")
def file(plain_model, tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "tiny-f32.gguf"
    write_gguf(plain_model, path)
    return path


IDS = torch.tensor([[1, 40, 90, 7, 2, 201, 260, 33]])


def test_logits_are_those_of_the_same_weights_by_file_and_by_directory(file, plain_model):
    expected = plain_model(IDS).logits
    for name in (file, file.parent):
        model = load_causal_lm(str(name), **FP32)
        torch.testing.assert_close(model.eval()(IDS).logits, expected)
    assert expected.std() > 0.5  # the comparison can fail


def q8_0(weight: torch.Tensor) -> torch.Tensor:
    """Blocks of 32 numbers, each an int8 times the block's fp16 scale, max|x| / 127."""
    blocks = weight.reshape(-1, 32)
    scale = blocks.abs().amax(1, keepdim=True) / 127
    return (scale.half().float() * (blocks / scale).round()).reshape(weight.shape)


def test_quantised_weights_are_those_that_the_file_holds(plain_model, tmp_path):
    write_gguf(plain_model, tmp_path / "q8.gguf", quantised=True)
    model = load_causal_lm(str(tmp_path / "q8.gguf"), **FP32).eval()
    rounded = copy.deepcopy(plain_model)
    with torch.no_grad():
        for weight in rounded.parameters():
            if weight.ndim == 2:
                weight.copy_(q8_0(weight))
    torch.testing.assert_close(model(IDS).logits, rounded(IDS).logits)
    assert not torch.allclose(model(IDS).logits, plain_model(IDS).logits, atol=1e-2)
    model.save_pretrained(tmp_path / "saved")
    again = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    torch.testing.assert_close(again(IDS).logits, rounded(IDS).logits)


def test_the_trunk_of_a_reward_model_is_the_same(file, plain_model):
    scored = new_scalar_model(str(file), seed=0, **FP32).eval()
    torch.testing.assert_close(
        scored.backbone(IDS).last_hidden_state, plain_model.model(IDS).last_hidden_state
    )
    with pytest.raises(ConfigError, match="it is no reward model"):
        load_scalar_model(str(file), **FP32)


def test_tokenizer_template_and_ends(file):
    tokenizer = load_tokenizer(str(file))
    ids = tokenizer("the")["input_ids"]
    # t is byte 116 after four special tokens; "he" is the one merge, and the last token.
    assert ids == [4 + 116, 260]
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (2, 3)
    fmt = ChatFormat(tokenizer)
    assert fmt.kind == "template"
    assert fmt.prompt_text([("user", "hi")]) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (fmt.stop_ids, fmt.end_id) == ((2,), 2)
    model = load_causal_lm(str(file), **FP32)
    assert eos_token_ids(model) == (2,)
    assert generation_eos_ids(str(file), load_model_config(str(file))) == (2,)


def test_what_is_saved_is_an_ordinary_directory(file, plain_model, tmp_path):
    load_causal_lm(str(file), **FP32).save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(file))
    tokenizer.save_pretrained(tmp_path)
    again = tf.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(again(IDS).logits, plain_model(IDS).logits)
    text = "hello there, 12 <|im_end|>"
    saved = tf.AutoTokenizer.from_pretrained(tmp_path)
    assert saved(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert saved.chat_template == TEMPLATE


def test_shape_comes_from_the_header(file, plain_model):
    shape = model_shape(str(file))
    assert shape is not None
    assert shape.parameters == sum(p.numel() for p in plain_model.parameters())
    assert model_positions(str(file.parent)) == 64


def test_the_content_names_the_input(file, tmp_path):
    second = tmp_path / "second.gguf"
    second.write_bytes(file.read_bytes())
    assert content_hash(str(second)) == content_hash(str(file))
    second.write_bytes(file.read_bytes()[:-1] + b"\x01")
    assert content_hash(str(second)) != content_hash(str(file))


def check(actor, tmp_path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "a", "response": "b"}) + "\n")
    sets = [f"model.actor={actor}", f"data.sources=[{tmp_path / 'rows.jsonl'}]", "stages=[sft]"]
    sets.append("data.max_length=64")
    config = load_run_config(overrides=[parse_set(s) for s in sets]).config
    check_inputs(config, RunDirectory(tmp_path / "out"))


def test_a_file_passes_the_checks_before_a_run(file, tmp_path):
    check(file, tmp_path)
    check(file.parent, tmp_path)


def test_without_the_package_the_error_names_it(file, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.setattr(gguf_files.importlib.util, "find_spec", lambda name: None)
    for attempt in (
        lambda: check(file, tmp_path),
        lambda: load_causal_lm(str(file), **FP32),
    ):
        with pytest.raises(ConfigError, match="pip install 'gguf"):
            attempt()


def test_files_that_are_not_there_or_not_gguf(file, tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        check(tmp_path / "absent.gguf", tmp_path)
    (tmp_path / "wrong.gguf").write_bytes(b"PK\x03\x04")
    with pytest.raises(ConfigError, match="is no GGUF file"):
        check(tmp_path / "wrong.gguf", tmp_path)
    whole = file.read_bytes()
    (tmp_path / "short.gguf").write_bytes(whole[: len(whole) // 2])
    for part in (len(whole) // 2, 4000, 40):
        (tmp_path / "short.gguf").write_bytes(whole[:part])
        with pytest.raises(ConfigError, match=r"short\.gguf") as caught:
            load_causal_lm(str(tmp_path / "short.gguf"), **FP32)
        assert "\n" not in str(caught.value)
        assert "Hub" not in str(caught.value)


def test_several_files_need_a_choice_and_safetensors_win(file, plain_model, tmp_path):
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(file.read_bytes())
    with pytest.raises(ConfigError, match="holds 2 GGUF files"):
        load_causal_lm(str(tmp_path), **FP32)
    plain_model.save_pretrained(tmp_path)
    assert gguf_files.gguf_file(str(tmp_path)) is None
    load_causal_lm(str(tmp_path), **FP32)


def test_another_file_of_that_name_in_the_working_directory_is_not_taken(
    file, plain_model, tmp_path, monkeypatch
):
    other = copy.deepcopy(plain_model)
    torch.nn.init.normal_(other.model.embed_tokens.weight)
    write_gguf(other, tmp_path / file.name)
    monkeypatch.chdir(tmp_path)
    torch.testing.assert_close(
        load_causal_lm(str(file), **FP32).eval()(IDS).logits, plain_model(IDS).logits
    )
