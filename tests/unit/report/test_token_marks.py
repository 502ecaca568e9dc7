"""Tokens with their mask, readable without colour; other people's text cannot steer."""

import io
import time

import pytest
from rich.console import Console

from rlhf_app.report.token_marks import marked_text, pieces
from rlhf_app.report.visible import one_line, visible


class Bytes:
    """A tokenizer whose ids are the bytes of UTF-8."""

    def decode(self, ids, clean_up_tokenization_spaces):
        assert clean_up_tokenization_spaces is False
        return bytes(ids).decode("utf-8", "replace")


TEXT = "a\u00e9\u4e2d\U0001f600z"  # 1, 2, 3, 4 and 1 bytes


def test_a_character_of_several_tokens_shows_at_its_last():
    ids = list(TEXT.encode())
    expected = ["a", "", "\u00e9", "", "", "\u4e2d", "", "", "", "\U0001f600", "z"]
    assert pieces(ids, Bytes()) == expected
    many = ids * 30
    assert "".join(pieces(many, Bytes())) == TEXT * 30
    assert "".join(pieces(ids[:-2], Bytes())).startswith("a\u00e9\u4e2d")  # cut inside a character


def test_pieces_of_a_real_tokenizer_join_to_its_text(shared_dir):
    import transformers

    for name in ("opt", "gpt2"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(shared_dir / "tokenizers" / name)
        text = " Hello  world, caf\u00e9 \U0001f469\u200d\U0001f4bb \u05e9\u05dc\u05d5\u05dd\n\nok"
        ids = tokenizer(text)["input_ids"]
        assert "".join(pieces(ids, tokenizer)) == tokenizer.decode(ids)


def test_a_long_row_costs_no_square():
    began = time.process_time()
    pieces(list(b"x" * 60_000), Bytes())
    assert time.process_time() - began < 5  # its square is 1.8e9 bytes


def plain(text):
    console = Console(file=io.StringIO(), no_color=True, width=500)
    console.print(text)
    return console.file.getvalue().rstrip("\n")


def test_the_mask_is_readable_without_colour():
    ids = list(b"ask:yes ask:no")
    assert plain(marked_text(ids, [(4, 7), (12, 14)], Bytes())) == "ask:>>>yes<<< ask:>>>no<<<"
    assert plain(marked_text(ids, [(0, 3), (3, 4)], Bytes())).startswith(">>>ask<<<>>>:<<<yes")
    assert plain(marked_text(ids, [], Bytes())) == "ask:yes ask:no"
    assert plain(marked_text(ids, [(2, 2)], Bytes())) == "ask:yes ask:no"


def test_what_was_cut_is_said_where_it_was_lost():
    ids = list(b"ask:yes")
    at_end = marked_text(ids, [(4, 7)], Bytes(), cut=9, cut_end=True)
    assert plain(at_end) == "ask:>>>yes<<< [cut: 9 tokens]"
    at_start = marked_text(ids, [(4, 7)], Bytes(), cut=9)
    assert plain(at_start) == "[cut: 9 tokens] ask:>>>yes<<<"


def test_marked_tokens_have_colours_of_their_own():
    text = marked_text(list(b"ab"), [(1, 2)], Bytes())
    styles = {text.plain[span.start : span.end]: str(span.style) for span in text.spans}
    assert styles["a"] == "white"
    assert "green" in styles["b"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\tb\nc", "a\tb\nc"),
        ("\x1b[31mred\x07\x00", "\\x1b[31mred\\x07\\x00"),
        ("\u202eabc\u2069", "\\u202eabc\\u2069"),
        ("\x9b1m", "\\x9b1m"),
        ("\ud83d", "\\ud83d"),
        ("\u05e9\u05dc \U0001f469\u200d\U0001f4bb", "\u05e9\u05dc \U0001f469\u200d\U0001f4bb"),
    ],
)
def test_control_characters_are_written_out(text, shown):
    assert visible(text) == shown


def test_one_line_is_short():
    assert one_line("a\n b\r\nc") == "a b c"
    assert one_line("x" * 1000, most=10) == "xxxxxxx..."
