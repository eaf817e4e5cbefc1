"""One HTML file with a plot of speeds: the inline SVG and a table of all tests. The page has no scripts and loads no
resources."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from localllm.cli.plots.runs import ResultRow, Run, matched

_STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --paper: #ffffff; --line: #d1d9e0; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --paper: #0d1117; --line: #3d444d; } }
body { margin: 0 auto; padding: 1rem; max-width: 75rem; font: 1rem/1.5 system-ui, sans-serif; color: var(--ink);
  background: var(--paper); }
h1 { font-size: 1.3rem; }
h2 { font-size: 1.1rem; }
figure { margin: 0; }
svg { width: 100%; height: auto; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 0.25rem 0.75rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, td:first-child, th:nth-child(2), td:nth-child(2) { text-align: left; }
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
HEADER = (
    "model", "test", "threads", "tokens per second", "±", "GOP per run", "GB per run", "operations per byte", "GOP/s",
    "GB/s measured", "placed",
)  # fmt: skip


def page(title: str, svg: bytes, runs: Sequence[Run]) -> bytes:
    """Return the HTML file."""
    text = svg.decode("utf-8")
    inline = text[text.index("<svg") :]
    parts = [_ratios(runs[0], runs[1])] if len(runs) > 1 else []
    parts += [f"<h2>{escape(run.name)}</h2>\n{_table(HEADER, [_cells(row) for row in run.rows])}" for run in runs]
    html = f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<title>{escape(title)}</title>
<style>{_STYLE}</style>
<h1>{escape(title)}</h1>
<figure role="img" aria-label="Roofline and rates; the tables below have the numbers">
{inline}</figure>
{chr(10).join(parts)}
<p>Operations are two for each weight of a matrix product. For a prompt, each weight and each cached row
counts once per pass.</p>
</html>
"""
    return html.encode()


def _ratios(new: Run, old: Run) -> str:
    rows = [
        (r.new.model, r.new.test, str(r.new.threads), f"{r.new.rate:.2f}", f"{r.old.rate:.2f}", f"{r.ratio:.3f}")
        for r in matched(new, old)
    ]
    return f"<h2>Ratios</h2>\n{_table(('model', 'test', 'threads', 'new', 'old', 'new / old'), rows)}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [_line("th", header), *(_line("td", row) for row in rows)]
    return '<div class="wide"><table>\n' + "\n".join(lines) + "\n</table></div>"


def _line(tag: str, cells: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"


def _cells(row: ResultRow) -> tuple[str, ...]:
    return (
        row.model,
        row.test,
        str(row.threads),
        f"{row.rate:.2f}",
        f"{row.spread:.2f}",
        _known(row.operations / 1e9),
        _known(row.bytes / 1e9),
        _known(row.intensity),
        _known(row.gop),
        _known(row.roof),
        row.placed,
    )


def _known(value: float) -> str:
    return f"{value:.4g}" if value else ""
