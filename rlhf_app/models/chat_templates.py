"""Chat templates in files, looked at before any tokenizer is loaded."""

from __future__ import annotations

from rlhf_app.errors import ConfigError
from rlhf_app.home import expanded

#: What a template may raise beside Jinja's own errors.
BROKEN_TEMPLATE = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)


def check_template(name: str) -> None:
    """Checks that a file is there and holds a template that Jinja can read.

    Args:
        name: the file.

    Raises:
        ConfigError: names the setting, the file and, for bad syntax, the line.
    """
    from jinja2 import TemplateSyntaxError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """transformers' tag around what the assistant writes."""

        tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    path = expanded(name)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = "no such file" if isinstance(error, FileNotFoundError) else f"not readable ({error})"
        raise ConfigError(f"data.chat_template {name}: {why}") from error
    if not text.strip():
        raise ConfigError(f"data.chat_template {name}: is empty; write a Jinja template into it")
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    try:
        environment.parse(text)
    except TemplateSyntaxError as error:
        raise ConfigError(
            f"data.chat_template {name}: line {error.lineno}: {error.message}"
        ) from error
