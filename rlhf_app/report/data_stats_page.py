"""`rlhf data stats --html`: one page with plots that loads nothing and runs no script.

Every text of the data and every name of a file goes through `html.escape`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from data_sources.records import Record
from data_sources.stats.lengths import PERCENTILES
from data_sources.stats.summary import DataStats, SourceStats, StageStats
from rlhf_app.report.data_stats_tables import STOPS, bias_cells, left_out, measured, share
from rlhf_app.report.svg import bars, histogram
from rlhf_app.report.visible import visible

_SHOWN = 600
_STYLE = """
body{font:14px/1.45 system-ui,sans-serif;max-width:1100px;margin:2em auto;padding:0 1em;color:#222}
table{border-collapse:collapse;margin:.5em 0 1.5em}
th,td{border-bottom:1px solid #ddd;padding:3px 10px;text-align:left;vertical-align:top}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}
figure{display:inline-block;margin:.5em 1.5em .5em 0;vertical-align:top}
figcaption{font-weight:600;margin-bottom:4px}
svg text{font-size:11px;fill:#444}.bar{fill:#4477aa}.over{fill:#cc6677}
pre{white-space:pre-wrap;overflow-wrap:anywhere;background:#f5f5f5;padding:.5em;margin:.2em 0}
.problem{color:#a00}
"""


def page(stats: DataStats) -> str:
    """Returns the HTML text of the page."""
    unit = stats.unit + (f" of {stats.model}" if stats.model else "")
    body = [
        "<h1>Data</h1>",
        *(f'<p class="problem">{_text(problem)}</p>' for problem in stats.refusals),
        f"<p>Lengths are in {_text(unit)}, before anything is cut.</p>",
        "<h2>Sources</h2>",
        _sources(stats.sources),
        *map(_contents, stats.sources),
        "<h2>Rows that give no record</h2>",
        _bad_rows(stats.sources),
        "<h2>Stages</h2>",
        *(_stage(name, stage) for name, stage in stats.stages.items()),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>rlhf data stats</title><style>{_STYLE}</style></head>\n"
        f"<body>{''.join(body)}</body></html>\n"
    )


def _text(text: str) -> str:
    return escape(visible(text))


def _table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Numbers, and strings that start with one, stand on the right; every cell is escaped."""
    lines = []
    for row in rows:
        cells = (str(cell) for cell in row)
        lines.append("".join(f"<td{_side(cell)}>{_lines(cell)}</td>" for cell in cells))
    if not lines:
        return "<p>None.</p>"
    head = "".join(f"<th>{_text(name)}</th>" for name in heads)
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _side(cell: str) -> str:
    return ' class="n"' if cell[:1].isdigit() and "\n" not in cell else ""


def _lines(cell: str) -> str:
    # bdi: a text that runs right to left does not turn the cells around it.
    return f"<bdi>{_text(cell)}</bdi>".replace("\n", "<br>")


def _name(source: SourceStats) -> str:
    return source.counts.path + (" (evaluation)" if source.evaluation else "")


def _sources(sources: list[SourceStats]) -> str:
    heads = ("source", "shape", "rows", "usable", "bad", "left out", "records", "remarks")
    rows = []
    for source in sources:
        counts = source.counts
        remarks = [f"{note}: {n}" for note, n in counts.notes.most_common()] + counts.looks
        if source.stops_a_run:
            remarks.insert(0, STOPS)
        bad, left_out = (share(n.total(), counts.read) for n in (counts.bad, counts.set_aside))
        numbers = (counts.read, counts.usable, bad, left_out, counts.records)
        rows.append((_name(source), counts.shape, *numbers, "\n".join(remarks) or "-"))
    return _table(heads, rows)


def _contents(source: SourceStats) -> str:
    records = source.counts.records
    rows = [
        ("different prompts", source.duplicates.prompts),
        ("records with the prompt of another", share(source.duplicates.same_prompt, records)),
        ("exact duplicates", share(source.duplicates.exact, records)),
        ("pairs whose answers are the same", source.identical_pairs),
        ("texts with emoji", source.prompts.with_emoji + source.answers.with_emoji),
    ]
    return (
        f"<h3>{_text(_name(source))}</h3>{_table(('', 'count'), rows)}"
        + bars(_safe(source.prompts.texts.most_common(8)), "prompts by their main script")
        + bars(_safe(source.answers.texts.most_common(8)), "answers by their main script")
    )


def _safe(values: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    return [(visible(name), number) for name, number in values]


def _bad_rows(sources: list[SourceStats]) -> str:
    rows = [
        (
            _name(source),
            _kind(source, reason),
            reason,
            number,
            "\n".join(source.counts.samples.get(reason, [])),
        )
        for source in sources
        for reason, number in source.counts.unusable.most_common()
    ]
    return _table(("source", "kind", "reason", "rows", "first of them"), rows)


def _kind(source: SourceStats, reason: str) -> str:
    return "bad" if reason in source.counts.bad else "left out"


def _stage(name: str, stage: StageStats) -> str:
    if stage.counts is None:
        return f'<h3>{_text(name)}</h3><p class="problem">{_text(stage.problem)}</p>'
    parts = measured(stage)
    heads = ("part", "texts", "mean", *(f"p{p}" for p in PERCENTILES), "max")
    numbers = [
        (
            part,
            lengths.total,
            f"{lengths.mean:.1f}",
            *(lengths.percentile(p) for p in PERCENTILES),
            max(lengths.counts),
        )
        for part, lengths in parts
    ]
    pieces = [
        f"<h3>{_text(name)}</h3>",
        _table(
            ("source", "train", "held out"),
            [(source, *numbers) for source, numbers in stage.by_source.items()],
        ),
        f"<p>Left out, or cut: {_text(_reasons(stage))}</p>",
        _table(heads, numbers),
        *(
            histogram(
                lengths.histogram(),
                f"{name}: {part}",
                stage.limit if lengths is stage.rows else None,
            )
            for part, lengths in parts
        ),
    ]
    if stage.limit is not None:
        over = share(stage.rows.above(stage.limit), stage.rows.total)
        pieces.append(f"<p>Longer than the limit of {stage.limit}: {over}</p>")
    if stage.bias:
        pieces.append("<h4>Is the longer answer the chosen one?</h4>" + _bias(stage))
    if stage.examples:
        pieces.append("<h4>Some rows</h4>" + "".join(map(_example, stage.examples)))
    return "".join(pieces)


def _reasons(stage: StageStats) -> str:
    return "; ".join(f"{n} {reason}" for reason, n in left_out(stage)) or "nothing"


def _bias(stage: StageStats) -> str:
    heads = ("source", "longer", "shorter", "same length", "mean chosen", "mean rejected")
    rows = [(source, *bias_cells(bias)) for source, bias in stage.bias.items()]
    plots = [
        bars(
            [("longer chosen", b.longer), ("shorter chosen", b.shorter), ("same length", b.equal)],
            visible(source),
        )
        for source, b in stage.bias.items()
    ]
    return _table(heads, rows) + "".join(plots)


def _example(record: Record) -> str:
    parts: list[tuple[str, str]] = [
        ("prompt" if record.rendered else m.role, m.content) for m in record.messages
    ]
    answers = (("response", record.response), ("chosen", record.chosen))
    parts += [(label, text) for label, text in answers if text is not None]
    parts += [("rejected", record.rejected)] if record.rejected is not None else []
    shown = "".join(f'<pre dir="auto"><b>{label}:</b> {_cut(text)}</pre>' for label, text in parts)
    return (
        f"<details><summary>{_text(record.source)} {_text(record.uid)}</summary>{shown}</details>"
    )


def _cut(text: str) -> str:
    more = f" ... ({len(text) - _SHOWN} more characters)" if len(text) > _SHOWN else ""
    return _text(text[:_SHOWN]) + more
