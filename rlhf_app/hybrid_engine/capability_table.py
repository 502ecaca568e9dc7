"""The capability table of the documentation, from what the probe found in each family."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from torch import nn

from rlhf_app.hybrid_engine.capability import Capability

HEADER = (
    "Family", "Attention", "Query : kv heads", "Window", "Softcap", "Position bias",
    "Row length", "Experts", "CUDA graph",
)  # fmt: skip
_NONE = "-"


def has_experts(model: nn.Module) -> bool:
    """Whether some layer is a mixture of experts.

    Args:
        model: any causal LM; every family in transformers calls that module `experts`.
    """
    return any(name.rsplit(".", 1)[-1] == "experts" for name, _ in model.named_modules())


def table(rows: Iterable[tuple[str, Capability, bool]]) -> str:
    """A Markdown table, one row per family.

    Args:
        rows: name, what the probe found, and whether the model has experts.

    Returns:
        The table, its last line ended.
    """
    lines = [HEADER, tuple("---" for _ in HEADER), *(_row(*row) for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _row(name: str, found: Capability, experts: bool) -> tuple[str, ...]:
    length = "the config's positions" if found.max_positions else "any"
    if found.missing is not None:
        native = f"native: lacks {found.missing}"
        return (name, native, *[_NONE] * 4, length, "yes" if experts else _NONE, _NONE)
    if found.engine_positions is not None:
        length = "the original positions, native beyond"
    return (
        name,
        "adapter" if found.adapted else "interface",
        f"{found.attention[0].query_heads} : {found.layers[0].kv_heads}",
        _share([layer.window for layer in found.attention]),
        _share([layer.softcap for layer in found.attention]),
        "ALiBi" if all(layer.biased for layer in found.attention) else _NONE,
        length,
        "yes" if experts else _NONE,
        "yes" if found.host_read is None else f"no: `{found.host_read}` reads on the host",
    )


def _share(values: Sequence[float | None]) -> str:
    """Values of the layers that have one, each with the number of layers it holds in."""
    counts = Counter(value for value in values if value is not None)
    total = len(values)
    return (
        ", ".join(
            f"{value:g}" if count == total else f"{value:g} in {count} of {total} layers"
            for value, count in counts.items()
        )
        or _NONE
    )
