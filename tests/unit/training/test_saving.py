from __future__ import annotations

import pytest
import torch
import transformers as tf
from tokenizers import Tokenizer, models, pre_tokenizers

from rlhf_app.training.distributed import Dist
from rlhf_app.training.saving import gather_state_dict, save_causal_lm

DIST = Dist(0, 0, 1, torch.device("cpu"))
IDS = torch.arange(3, 12)[None]


@pytest.fixture
def model():
    torch.manual_seed(0)
    return tf.LlamaForCausalLM(
        tf.LlamaConfig(
            vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=32,
            bos_token_id=1, eos_token_id=2, tie_word_embeddings=True,
        )
    )  # fmt: skip


@pytest.fixture
def tokenizer():
    fast = Tokenizer(models.WordLevel({"<unk>": 0, "<pad>": 1, "</s>": 2}, unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=fast, unk_token="<unk>", pad_token="<pad>", eos_token="</s>",
        chat_template="{{ messages[0].content }}",
    )  # fmt: skip


def test_state_is_a_copy_in_which_ties_are_kept(model):
    state = gather_state_dict(model, DIST)
    assert state["lm_head.weight"] is state["model.embed_tokens.weight"]
    before = state["lm_head.weight"].clone()
    with torch.no_grad():
        model.lm_head.weight.zero_()
    assert torch.equal(state["lm_head.weight"], before)


def test_other_ranks_hold_nothing(model):
    assert gather_state_dict(model, Dist(1, 1, 2, torch.device("cpu"))) == {}


def test_plain_transformers_loads_the_artifact(model, tokenizer, tmp_path):
    model.config.use_cache = False
    expected = model(IDS).logits
    save_causal_lm(model, tokenizer, tmp_path / "out", DIST, stop_ids=(2, 7))
    loaded = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(loaded(IDS).logits, expected)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert loaded.config.use_cache
    assert loaded.generation_config.eos_token_id == [2, 7]
    assert loaded.generation_config.pad_token_id == 1
    saved = tf.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert saved.chat_template == tokenizer.chat_template
    # The model in training stays as it was.
    assert model.config.use_cache is False


def test_training_goes_on_with_the_same_configs(model, tokenizer, tmp_path):
    """The writing rank's config must not come to differ from that of the others."""
    config, generation = model.config, model.generation_config
    model.config.use_cache = False
    before = config.to_dict(), config.dtype, generation.to_dict()
    save_causal_lm(model, tokenizer, tmp_path / "out", DIST, stop_ids=(2, 7))
    assert model.config is config
    assert model.generation_config is generation
    assert (config.to_dict(), config.dtype, generation.to_dict()) == before


def test_one_stop_id_is_written_as_a_number(model, tokenizer, tmp_path):
    save_causal_lm(model, tokenizer, tmp_path / "out", DIST, stop_ids=(7,))
    assert tf.GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == 7


def test_a_temperature_without_sampling_does_not_stop_the_save(model, tokenizer, tmp_path):
    # As in some published checkpoints; transformers loads this and refuses to save it.
    model.generation_config.temperature = 0.9
    model.generation_config.top_p = 0.6
    with pytest.raises(ValueError, match="temperature"):
        model.generation_config.save_pretrained(tmp_path / "theirs")
    save_causal_lm(model, tokenizer, tmp_path / "out", DIST)
    assert tf.GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == 2
