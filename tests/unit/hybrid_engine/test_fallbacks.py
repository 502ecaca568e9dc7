"""Models that the workspace cannot serve: right all the same, with one warning, or refused."""

import pytest
import torch
import transformers as tf

from rlhf_app.errors import ConfigError
from rlhf_app.hybrid_engine import Generator, SamplingParams

STATE = "a state of attention keys and values alone"
UNSERVED = {
    "mpt": "a forward that takes position_ids",
    "gpt-oss": "attention argument 's_aux'",
    "xglm": "a forward that runs over the workspace (ValueError: Attention mask",
    "falcon-h1": STATE,
    "mamba": STATE,
    "mamba2": STATE,
    "rwkv": STATE,
    "recurrent-gemma": STATE,
    "qwen3-next": STATE,
}
_TEXT = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


def _wide(model):
    """Weights that make varied text."""
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() >= 2:
                weight.normal_(0, 0.25)
    model.generation_config = tf.GenerationConfig()
    return model.eval()


def _assert_logprobs(model, prompts, rollout, greedy=False):
    """Of a forward over each whole row, alone; greedy tokens have its largest logits."""
    for prompt, answer, logprobs in zip(prompts, rollout.tokens, rollout.logprobs, strict=True):
        with torch.no_grad():
            ids = torch.tensor([[*prompt, *answer]])
            logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        want = logits.log_softmax(-1)
        taken = want.gather(-1, torch.tensor(answer)[:, None])[:, 0]
        torch.testing.assert_close(logprobs, taken, atol=1e-4, rtol=0)
        assert not greedy or (want.max(-1).values - taken < 1e-4).all()
    assert len({token for row in rollout.tokens for token in row}) >= 4, "degenerate text"


@pytest.mark.parametrize("family", UNSERVED)
def test_unserved_families_are_right_with_one_warning(family, build, prompts, warnings_of):
    """Ragged prompts, of one token too: no row may see another's padding or state."""
    model = build(family)
    generator = Generator(model)
    params = SamplingParams(6, greedy=True)
    prompts = [*prompts[:7], [50]]
    with warnings_of() as warned:
        generator.rollout(prompts[:2], params)
        rollout = generator.rollout(prompts, params)
        generator.generate(torch.tensor([[5, 6]]), max_new_tokens=2, use_cache=True)
    assert len(warned) == 1
    assert warned[0].startswith(f"model type {model.config.model_type!r} lacks {UNSERVED[family]}")
    assert warned[0].endswith("using native generate, which is slower")
    assert rollout.timings.form == "native"
    _assert_logprobs(model, prompts, rollout, greedy=True)


def test_a_state_kept_in_the_module_reaches_no_later_prompt(build):
    model = build("recurrent-gemma")
    generator = Generator(model)
    params = SamplingParams(6, greedy=True)
    prompts = [[7], [50]]
    first = generator.rollout(prompts, params).tokens
    generator.rollout([[9, 8, 7], [3, 4, 5]], params)
    assert generator.rollout(prompts, params).tokens == first
    sampled = SamplingParams(6, seed=2)
    _assert_logprobs(model, prompts, generator.rollout(prompts, sampled))


@pytest.mark.parametrize(
    "config",
    [
        tf.T5Config(
            vocab_size=97, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4,
            decoder_start_token_id=0, pad_token_id=0, eos_token_id=1,
        ),
        tf.BartConfig(
            vocab_size=97, d_model=32, decoder_layers=2, decoder_attention_heads=4,
            decoder_ffn_dim=48, encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=48,
            max_position_embeddings=64,
        ),
    ],
    ids=["t5", "bart"],
)  # fmt: skip
def test_encoder_decoders_are_refused_or_left_to_transformers(config, warnings_of):
    torch.manual_seed(0)
    model = tf.AutoModelForSeq2SeqLM.from_config(config).eval()
    generator = Generator(model)
    with pytest.raises(ConfigError, match=f"{config.model_type!r} is an encoder-decoder"):
        generator.rollout([[5, 6, 7]], SamplingParams(4))
    ids = torch.tensor([[5, 6, 7], [0, 8, 9]])
    with warnings_of() as warned:
        got = generator.generate(ids, (ids > 0).long(), max_new_tokens=5)
        generator.generate(ids, max_new_tokens=5)
    assert len(warned) == 1
    assert f"model type {config.model_type!r} (an encoder-decoder)" in warned[0]
    want = model.generate(ids, attention_mask=(ids > 0).long(), max_new_tokens=5)
    assert got.tolist() == want.tolist()


def _llava():
    vision = tf.CLIPVisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        image_size=16, patch_size=8,
    )  # fmt: skip
    return tf.LlavaForConditionalGeneration(
        tf.LlavaConfig(
            vision_config=vision, text_config=tf.LlamaConfig(**_TEXT), image_token_index=96,
            vision_feature_layer=-1,
        )
    )  # fmt: skip


def _qwen_vl():
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    vision = {
        "depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4,
        "out_hidden_size": 32, "patch_size": 4,
    }  # fmt: skip
    return tf.Qwen2_5_VLForConditionalGeneration(
        tf.Qwen2_5_VLConfig(
            text_config={**_TEXT, "rope_parameters": rope}, vision_config=vision,
            image_token_id=90, video_token_id=91, vision_start_token_id=92, vision_end_token_id=93,
        )
    )  # fmt: skip


@pytest.mark.parametrize("make", [_llava, _qwen_vl], ids=["llava", "qwen2.5-vl"])
def test_text_prompts_of_a_vision_language_model_are_served(
    make, prompts, hf_greedy, assert_same_greedy, warnings_of
):
    model = _wide(make())
    text = [[token % 85 for token in prompt] for prompt in prompts]
    generator = Generator(model)
    with warnings_of() as warned:
        got = generator.rollout(text, SamplingParams(8, greedy=True)).tokens
    assert warned == []
    assert_same_greedy(model, text, got, hf_greedy(model, text, 8))


def test_images_go_to_transformers_with_one_warning(warnings_of):
    model = _wide(_llava())
    pixels = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([[5, *[96] * 4, 7, 8]])
    arguments = {"pixel_values": pixels, "max_new_tokens": 6}
    with warnings_of() as warned:
        got = Generator(model).generate(ids, torch.ones_like(ids), **arguments)
    assert len(warned) == 1
    assert "pixel_values" in warned[0]
    want = model.generate(ids, attention_mask=torch.ones_like(ids), **arguments)
    assert got.tolist() == want.tolist()
    other = model.generate(
        ids, attention_mask=torch.ones_like(ids), **{**arguments, "pixel_values": -3 * pixels}
    )
    assert got.tolist() != other.tolist(), "the image does not matter: nothing is tested"
