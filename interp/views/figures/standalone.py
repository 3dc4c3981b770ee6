"""A figure with its words in it: what a page sets as HTML around a figure, drawn inside it."""

import html
import textwrap

import plotly.graph_objects as go

from interp.views.figures.style import literal

WIDTH = 900
"""Pixels of a figure that does not say how wide it is."""

LEAST = 460

# Pixels: the edge of the figure, and letters and lines of the title, the subtitle and the words.
_EDGE = 16
_GAP = 10
_TITLE, _SUBTITLE, _WORDS = (8.3, 20), (6.3, 15), (6.0, 15)
_WORDS_FONT = 11.5


def standalone(figure: go.Figure) -> go.Figure:
    """A copy with the title and subtitle wrapped above, the caption and the notes below the plot.

    The copy has a width of its own, at least 460 pixels, and grows in height by its words.
    """
    whole = go.Figure(figure.to_dict())
    layout = whole.layout
    width = max(int(layout.width or WIDTH), LEAST)
    meta = layout.meta if isinstance(layout.meta, dict) else {}
    title = _wrapped(layout.title.text, width, *_TITLE)
    subtitle = _wrapped(layout.title.subtitle.text, width, *_SUBTITLE)
    words = [
        line
        for text in (meta.get("caption"), *meta.get("notes", ()))
        for line in _wrapped(literal(text or ""), width, *_WORDS)
    ]
    left, bottom = layout.margin.l or 0, layout.margin.b or 0
    above = max(len(title) - 1, 0) * _TITLE[1] + max(len(subtitle) - 1, 0) * _SUBTITLE[1]
    below = _GAP + len(words) * _WORDS[1] + _EDGE if words else 0
    layout.update(
        title={
            "text": "<br>".join(title),
            "subtitle": {"text": "<br>".join(subtitle)},
            "x": _EDGE / width,
            "xref": "container",
            # plotly sets the first of several lines higher than a single one.
            "pad": {"t": 14 + 9 * (len(title) - 1)},
        },
        margin={"t": (layout.margin.t or 0) + above, "b": bottom + below},
        height=(layout.height or 450) + above + below,
        width=width,
    )
    # Without a distance of its own a title goes to the end of the margin, where the words are.
    whole.for_each_xaxis(lambda axis: axis.title.update(standoff=axis.title.standoff or 6))
    if words:
        whole.add_annotation(
            text="<br>".join(words),
            x=0,
            xref="paper",
            xanchor="left",
            xshift=_EDGE - left - 2,
            y=0,
            yref="paper",
            yanchor="top",
            yshift=-bottom - _GAP,
            align="left",
            showarrow=False,
            font={"size": _WORDS_FONT},
        )
    return whole


def plain_words(figure: go.Figure) -> list[str]:
    """The title, the subtitle, the caption and the notes as they read, one text each."""
    meta = figure.layout.meta if isinstance(figure.layout.meta, dict) else {}
    title = figure.layout.title
    drawn = (html.unescape(text or "") for text in (title.text, title.subtitle.text))
    return [text for text in (*drawn, meta.get("caption"), *meta.get("notes", ())) if text]


def _wrapped(text: str | None, width: int, letter: float, _line: int) -> list[str]:
    """Literal text in lines that fit, each literal again: no line ends inside an entity."""
    lines = textwrap.wrap(html.unescape(text or ""), max(int((width - 2 * _EDGE) / letter), 20))
    return [literal(line) for line in lines]
