"""Loading tokenizers: errors say what is wrong; the hash follows what ids mean."""

import json

import pytest

from rlhf_app.errors import ConfigError
from rlhf_app.models.tokenizer import load_tokenizer, padding_id, tokenizer_hash


def test_a_missing_pad_token_becomes_eos_without_new_ids(shared_dir):
    tokenizer = load_tokenizer(str(shared_dir / "tokenizers" / "gpt2"))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 50256
    assert len(tokenizer) == 50257


def test_an_existing_pad_token_stays(shared_dir):
    tokenizer = load_tokenizer(str(shared_dir / "tokenizers" / "opt"))
    assert (tokenizer.pad_token, tokenizer.pad_token_id) == ("<pad>", 1)


def test_padding_without_a_pad_token_takes_any_id(shared_dir):
    tokenizer = load_tokenizer(str(shared_dir / "tokenizers" / "opt"))
    assert padding_id(tokenizer) == 1
    tokenizer.pad_token = tokenizer.eos_token = None
    assert padding_id(tokenizer) == 0


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/no/such/model", "does not exist"),
        ("./missing", "does not exist"),
        ("a/b/c", "does not exist"),
    ],
)
def test_missing_directories_are_not_looked_for_on_the_hub(path, words):
    with pytest.raises(ConfigError, match=words) as caught:
        load_tokenizer(path)
    assert path in str(caught.value)


def test_directories_without_a_tokenizer_and_files(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds no tokenizer"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(ConfigError, match="is a file"):
        load_tokenizer(str(tmp_path / "config.json"))
    (tmp_path / "tokenizer.json").write_text("{broken")
    with pytest.raises(ConfigError, match="cannot be read") as caught:
        load_tokenizer(str(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("ConnectionError", "Hub cannot be reached"),
        ("LocalEntryNotFoundError", "Hub cannot be reached"),
        ("RepositoryNotFoundError", "neither a directory here nor a model"),
        ("GatedRepoError", "accept its licence"),
    ],
)
def test_hub_failures_are_told_apart(monkeypatch, kind, words):
    import transformers

    def fail(*args, **kwargs):
        # transformers wraps the Hub's error in an OSError.
        raise OSError("some words\nmore words") from type(kind, (Exception,), {})("inner")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", fail)
    with pytest.raises(ConfigError, match=words) as caught:
        load_tokenizer("owner/name")
    assert "\n" not in str(caught.value)


def test_hash_survives_saving_calls_and_pad_and_differs_between_tokenizers(shared_dir, tmp_path):
    places = ["tokenizers/opt", "models/stories260K"]
    hashes = {}
    for place in places:
        tokenizer = load_tokenizer(str(shared_dir / place))
        hashes[place] = tokenizer_hash(tokenizer)
        tokenizer(["a", "b c d"], padding=True, truncation=True, max_length=2)
        tokenizer.chat_template = "{{ messages }}"
        assert tokenizer_hash(tokenizer) == hashes[place]
        tokenizer.save_pretrained(tmp_path / place)
        assert tokenizer_hash(load_tokenizer(str(tmp_path / place))) == hashes[place]
    assert len(set(hashes.values())) == 2


def test_hash_changes_with_vocabulary_and_added_tokens(shared_dir, tmp_path):
    source = shared_dir / "models" / "stories260K"
    tokenizer = load_tokenizer(str(source))
    before = tokenizer_hash(tokenizer)
    tokenizer.add_tokens(["<|new|>"])
    assert tokenizer_hash(tokenizer) != before
    state = json.loads((source / "tokenizer.json").read_text())
    state["model"]["merges"].pop()
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    (tmp_path / "tokenizer_config.json").write_text((source / "tokenizer_config.json").read_text())
    assert tokenizer_hash(load_tokenizer(str(tmp_path))) != before
