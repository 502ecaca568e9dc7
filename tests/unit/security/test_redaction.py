"""What is hidden in a text, what is not, and how workers get what a file leaves out."""

from __future__ import annotations

import logging
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from data_sources.web import WebFiles
from rlhf_app.__main__ import show_error
from rlhf_app.config.hidden import hidden_settings
from rlhf_app.config.load import load_config, load_saved, parse_set
from rlhf_app.config.yaml_files import dump_config
from rlhf_app.deployment.failures import WorkerError
from rlhf_app.errors import ConfigError
from rlhf_app.url_secrets import WithoutSecrets, without_secrets

TOKEN = "hf_PlantedTokenOfTheHub0123456789"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("s3://key:secret@bucket/x.jsonl?", "s3://***@bucket/x.jsonl?"),
        ("zip://*.csv::https://u:p@h/x?k=1", "zip://*.csv::https://***@h/x?***"),
        (f"token {TOKEN} is wrong", "token hf_*** is wrong"),
        ("Authorization: Bearer abc.DEF-123456789", "Authorization: Bearer ***"),
        ("Basic QWxhZGRpbjpvcGVu==", "Basic ***"),
        ("Basic understanding of hf_models and bearer bonds", None),
        ("mail a@b.c, ratio 3:4@5, what? yes", None),
        ("http://h/x?***: status 403", None),
    ],
)
def test_texts(text, shown):
    hidden = without_secrets(text)
    assert hidden == (text if shown is None else shown)
    assert without_secrets(hidden) == hidden


def test_values_of_secret_variables(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    monkeypatch.setenv("PGPASSWORD", "short")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "notASecret")
    text = "0123456789abcdef short notASecret"
    assert without_secrets(text) == "*** short notASecret"


def test_what_a_server_repeats():
    sent = "http://ann:pa%40ssword@h/x?key=abcdef123&n=1"
    # printf 'ann:pa@ssword' | base64
    said = "you are ann:pa@ssword (YW5uOnBhQHNzd29yZA==), pa%40ssword, and your key abcdef123 is 1"
    assert without_secrets(said, [sent]) == "you are *** (***), ***, and your key *** is 1"
    assert without_secrets("http://[", ["http://["]) == "http://["


def test_log_lines_and_tracebacks(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    try:
        raise ValueError(f"cannot open https://u:p@h/x with {TOKEN}")
    except ValueError as error:
        record = logging.LogRecord("n", 20, "f", 1, "got %s", (TOKEN,), None)
        record.exc_info = (ValueError, error, error.__traceback__)
        described = WorkerError.from_exception(error)
    line = WithoutSecrets("%(message)s").format(record)
    assert line.startswith("got hf_***\n")
    for text in (line, described.message, described.last_line, described.traceback):
        assert TOKEN not in text
        assert "u:p@" not in text
    assert described.message == "cannot open https://***@h/x with hf_***"


def test_an_exception_that_nobody_caught(capsys):
    try:
        raise RuntimeError(f"no https://u:p@h/x?key=1 for {TOKEN}")
    except RuntimeError as error:
        show_error(RuntimeError, error, error.__traceback__)
    said = capsys.readouterr().err
    assert said.startswith("Traceback (most recent call last):\n")
    assert said.endswith("\nRuntimeError: no https://***@h/x?*** for hf_***\n")


def test_a_login_stays_with_its_own_host():
    """The second server is another host: another name of this machine."""
    seen: list[tuple[str, str | None]] = []

    class Server(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append((self.path, self.headers["Authorization"]))
            port = self.server.server_address[1]
            moved = self.path == "/first"
            self.send_response(302 if moved else 200)
            self.send_header("Location", f"http://localhost:{port}/second")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        WebFiles().open(f"http://u:p@127.0.0.1:{server.server_port}/first", "rb").close()
        server.shutdown()
    assert seen == [("/first", "Basic dTpw"), ("/second", None)]


def test_a_saved_configuration_and_what_it_leaves_out(tmp_path, monkeypatch):
    """Two addresses that look the same once hidden must not be mixed up."""
    sources = [f"http://u:{word}@h/score?key={word}" for word in ("first", "second")]
    config = load_config(
        overrides=[parse_set(f"ppo.rewards={sources}"), parse_set("model.actor=some/model")]
    ).config
    file = tmp_path / "config.yaml"
    file.write_text(dump_config(config))
    assert file.read_text().count("- http: http://***@h/score?***\n") == 2
    with pytest.raises(ConfigError, match=r"ppo\.rewards = http://\*\*\*@h/score\?\*\*\* \(from"):
        load_saved(file)
    variables = hidden_settings(config)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert load_saved(file) == config
    # Changed by hand: what the file says counts.
    file.write_text(file.read_text().replace("http://***@h/score?***", "http://h/new"))
    assert [source.http for source in load_saved(file).ppo.rewards] == ["http://h/new"] * 2


def test_nothing_to_hide():
    assert hidden_settings(load_config().config) == {}
