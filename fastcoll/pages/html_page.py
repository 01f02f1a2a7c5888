"""Pages of results: one HTML file with plots and tables, which needs no network.

The plots are Plotly's figures, given as plain data. The library itself, 5 MB of JavaScript, is inside the page.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import UnavailableError, install

# Okabe and Ito's colours, which colour-blind people can distinguish.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #222; max-width: 1100px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: .3rem; } h2 { font-size: 1.15rem; margin: 2rem 0 .2rem; }
p { margin: .3rem 0; } .scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; margin: .6rem 0; }
th, td { padding: .25rem .6rem; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } th { border-bottom: 2px solid #888; }
"""


class Plot(NamedTuple):
    """A plot under a heading: Plotly's traces and layout, and a caption that explains them."""

    title: str
    caption: str
    traces: Sequence[dict[str, Any]]
    layout: dict[str, Any]
    height: int = 420


class PageTable(NamedTuple):
    """A table under a heading, and a caption that explains it."""

    title: str
    caption: str
    names: Sequence[str]
    rows: Sequence[Sequence[str]]


def require() -> None:
    """Check that pages can be made.

    Raises:
        UnavailableError: Plotly is not installed.
    """
    if find_spec("plotly") is None:
        raise UnavailableError(f"an HTML page needs plotly; {install('profile')}")


def write(path: Path, title: str, about: Sequence[str], parts: Sequence[Plot | PageTable]) -> None:
    """Write a page: a title, paragraphs about it, and then the plots and tables.

    Raises:
        UnavailableError: Plotly is not installed.
        OSError: the file cannot be written.
    """
    path.write_text(page(title, about, parts), encoding="utf-8")


def page(title: str, about: Sequence[str], parts: Sequence[Plot | PageTable]) -> str:
    """Return the page that `write` writes."""
    require()
    from plotly.io import to_html
    from plotly.offline import get_plotlyjs

    body = [f"<h1>{escape(title)}</h1>", *(f"<p>{escape(each)}</p>" for each in about)]
    for part in parts:
        body.append(f"<h2>{escape(part.title)}</h2><p>{escape(part.caption)}</p>")
        if isinstance(part, PageTable):
            body.append(table_html(part))
            continue
        layout = {"margin": {"l": 70, "r": 20, "t": 40, "b": 60}, "height": part.height, "colorway": COLOURS}
        layout |= {"template": "plotly_white", "font": {"size": 13}} | part.layout
        figure = {"data": list(part.traces), "layout": layout}
        body.append(to_html(figure, full_html=False, include_plotlyjs=False, config={"displaylogo": False}))
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><link rel="icon" href="data:,"><style>{_STYLE}</style>'
    script = f"<script>{get_plotlyjs()}</script>"
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head>{head}{script}</head><body>{"".join(body)}</body></html>\n'
    )


def table_html(table: PageTable) -> str:
    rows = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in table.rows)
    names = "".join(f"<th>{escape(name)}</th>" for name in table.names)
    return f'<div class="scroll"><table><thead><tr>{names}</tr></thead><tbody>{rows}</tbody></table></div>'
