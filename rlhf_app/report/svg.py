"""Small plots as SVG text, for pages that load nothing from anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

_HEIGHT, _BAR, _GAP = 110, 16, 2
_ROW, _LABEL = 20, 190


def histogram(bins: Sequence[tuple[int, int, int]], title: str, limit: int | None = None) -> str:
    """Returns a histogram.

    Args:
        bins: (first value, last value, count), as `Lengths.histogram` gives them.
        title: over the plot.
        limit: bins that lie beyond it are drawn in another colour.
    """
    if not bins:
        return ""
    width = len(bins) * (_BAR + _GAP)
    top = max(count for _, _, count in bins)
    bars = []
    for place, (low, high, count) in enumerate(bins):
        height = max(round(_HEIGHT * count / top), 1) if count else 0
        over = limit is not None and low > limit
        bars.append(
            f'<rect class="{"over" if over else "bar"}" x="{place * (_BAR + _GAP)}" '
            f'y="{_HEIGHT - height}" width="{_BAR}" height="{height}">'
            f"<title>{low} to {high}: {count}</title></rect>"
        )
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>"
        f'<svg role="img" aria-label="{escape(title)}" width="{width}" height="{_HEIGHT + 18}" '
        f'viewBox="0 0 {width} {_HEIGHT + 18}">{"".join(bars)}'
        f'<text x="0" y="{_HEIGHT + 14}">{bins[0][0]}</text>'
        f'<text x="{width}" y="{_HEIGHT + 14}" text-anchor="end">{bins[-1][1]}</text>'
        "</svg></figure>"
    )


def bars(values: Sequence[tuple[str, int]], title: str, width: int = 260) -> str:
    """Returns horizontal bars, each with its name before and its count behind it."""
    if not values:
        return ""
    top = max(max(count for _, count in values), 1)
    rows = []
    for place, (name, count) in enumerate(values):
        y = place * _ROW
        length = round(width * count / top)
        rows.append(
            f'<text x="{_LABEL - 6}" y="{y + 14}" text-anchor="end">{escape(name)}</text>'
            f'<rect class="bar" x="{_LABEL}" y="{y + 3}" width="{length}" height="{_ROW - 6}"/>'
            f'<text x="{_LABEL + length + 6}" y="{y + 14}">{count}</text>'
        )
    total = (_LABEL + width + 80, len(values) * _ROW)
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>"
        f'<svg role="img" aria-label="{escape(title)}" width="{total[0]}" height="{total[1]}" '
        f'viewBox="0 0 {total[0]} {total[1]}">{"".join(rows)}</svg></figure>'
    )
