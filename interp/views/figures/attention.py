"""Plotly figures of attention on one text: one head's pattern, and many heads in a grid.

One invariant: cell (q, k) is what query q gives to key k, with query 0 at the top; a position is a
number, so that equal tokens keep their own rows and columns.
"""

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Bool, Float

from interp.errors import AnalysisError
from interp.patterns import Patterns
from interp.views.figures import style
from interp.views.figures.style import drawable, literal

UNIT = "attention probability"

# Pixels.
_MOST, _LEAST, _CELL, _TICK, _LETTER = 620, 100, 34, 15, 6.4
_TILES, _TILE, _NAME = 860, 150, 18
_COLUMNS = 8

_SUM = 0.1
"""How far a row may be from 1: patterns from a file are rounded, each weight by 0.004 at most."""

_LABEL = 14
"""Letters of a token beside an axis; the whole of it is on hover."""

NAMED = 200
"""Tokens up to which a hover names those of its cell; above it gives their positions."""


def attention_map(patterns: Patterns, layer: int, head: int, *, top: float | int = 1) -> go.Figure:
    """One head's pattern on its text: queries down, keys across, colour from 0 to `top`.

    Weights above `top` have the colour of `top`, and are counted in the notes: a smaller `top`
    shows small weights apart. Keys that a query may not attend to stay blank.

    Raises:
        AnalysisError: the head's pattern was left out, or is too large for a figure.
    """
    return pattern_map(
        patterns.pattern(layer, head),
        patterns.tokens,
        title=f"Attention of L{layer}H{head}",
        subtitle=_origin(patterns),
        allowed=_allowed(patterns, layer),
        top=top,
    )


def pattern_map(
    pattern: Float[np.ndarray, "query key"],
    tokens: Sequence[str],
    *,
    title: str,
    subtitle: str,
    allowed: Bool[np.ndarray, "query key"] | None = None,
    top: float | int = 1,
) -> go.Figure:
    """A pattern on its tokens, as `attention_map` draws it; `allowed` keys are never blank.

    Raises:
        AnalysisError: the pattern is not one of these tokens, or is too large for a figure.
    """
    count = len(tokens)
    if pattern.shape != (count, count):
        shape = " x ".join(map(str, pattern.shape))
        raise AnalysisError(
            f"{title}: the pattern is {shape} and there are {count} tokens: it should be "
            f"{count} x {count}"
        )
    style.room_for(count**2, f"{title}, {count:,} tokens")
    _check_top(top)
    grid = _grid(pattern, allowed)
    size = max(min(_CELL * count, _MOST), _LEAST)
    label_room = round(
        12 + _LETTER * min(_LABEL, max((len(visible(t)) for t in tokens), default=1))
    )
    figure = style.figure(
        title,
        subtitle,
        "Row q is what query q attends to, the first query at the top; the stronger a cell's "
        f"colour, the more weight its key gets. {_colours_say(top)}"
        + (" Keys that a query cannot see are blank." if _has_blank(grid) else "")
        + ("" if count <= NAMED else " Hover gives positions; tokens are beside the axes."),
        plot_height=size,
        margins=(label_room + 18, 12, label_room + 22),
        width=size + label_room + 130,
        notes=_notes([("", pattern)], top),
    )
    positions = list(range(count))
    names = [f"{place} {_quoted(token)}" for place, token in enumerate(tokens)]
    named = count <= NAMED  # two names a cell weigh more than all else
    figure.add_heatmap(
        z=grid,
        x=positions,
        y=positions,
        customdata=[[[query, key] for key in names] for query in names] if named else None,
        hovertemplate=f"query {'%{customdata[0]}' if named else '%{y}'}<br>"
        f"key {'%{customdata[1]}' if named else '%{x}'}<br>weight %{{z:.4g}}<extra></extra>",
        coloraxis="coloraxis",
        hoverongaps=False,
        **({"xgap": 1, "ygap": 1} if size >= 8 * count else {}),
    )
    every = -(-count * _TICK // size)
    ticks = {
        "tickmode": "array",
        "tickvals": positions[::every],
        "ticktext": [literal(_short(visible(token))) for token in tokens[::every]],
        "ticks": "",
        "showgrid": False,
        "zeroline": False,
        "constrain": "domain",
    }
    figure.update_layout(
        coloraxis=_colour_axis(top, size),
        xaxis=ticks
        | {"title": {"text": "key", "standoff": 6}, "tickangle": -90, "constraintoward": "left"},
        yaxis=ticks
        | {
            "title": {"text": "query", "standoff": 6},
            "tickangle": 0,
            "autorange": "reversed",
            "scaleanchor": "x",
            "constraintoward": "top",
        },
    )
    return figure


def attention_grid(
    patterns: Patterns,
    heads: Sequence[tuple[int, int]] | None = None,
    *,
    columns: int | None = None,
    top: float | int = 1,
) -> go.Figure:
    """Small maps of many heads on one text and one colour range, 0 to `top`.

    `heads` are by default all whose pattern is here, the furthest from uniform first; `columns` is
    how many stand in a row.

    Raises:
        AnalysisError: there is no head, a head's pattern was left out, or all together are too
            large for a figure.
    """
    chosen = patterns.drawn if heads is None else list(heads)
    if not chosen:
        raise AnalysisError("nothing to draw: there is no pattern of any head")
    count = len(patterns.tokens)
    style.room_for(
        len(chosen) * count**2, f"a grid of {len(chosen)} heads on {count:,} tokens (name fewer)"
    )
    _check_top(top)
    if columns is not None and columns < 1:
        raise AnalysisError(f"columns = {columns}: at least 1")
    across = min(columns or _COLUMNS, len(chosen))
    down = -(-len(chosen) // across)
    tile = min((_TILES - 10 * across) / across, _TILE)  # pixels
    cell = tile / count
    # All maps share one pair of axes: hundreds of pairs would take a browser a minute.
    wide, high = count + 10 / cell, count + (_NAME + 8) / cell
    drawn = [(one, patterns.pattern(*one)) for one in chosen]
    grids = [_grid(pattern, _allowed(patterns, layer)) for (layer, _), pattern in drawn]
    left = patterns.params.get("left_out")
    figure = style.figure(
        f"Attention of {len(chosen)} heads",
        _origin(patterns),
        "One small map a head: queries down, the first at the top, keys across. "
        + ("The heads furthest from even attention come first. " if heads is None else "")
        + f"{_colours_say(top)} All maps share one range."
        + (" Keys that a query cannot see are blank." if any(map(_has_blank, grids)) else ""),
        plot_height=round(down * high * cell),
        margins=(10, 10, 54),
        head_room=4,
        width=round(across * wide * cell) + 20,
        notes=[
            *_notes([(f"L{a}H{b}: ", pattern) for (a, b), pattern in drawn], top),
            *_not_drawn(left if heads is None and isinstance(left, list) else []),
        ],
    )
    maps, labels, frames = [], [], []
    for place, ((layer, head), grid) in enumerate(zip(chosen, grids, strict=True)):
        name = f"L{layer}H{head}"
        x, y = place % across * wide, place // across * high + _NAME / cell
        maps.append(
            {
                "type": "heatmap",
                "z": grid,
                "x": [x + key for key in range(count)],
                "y": [y + query for query in range(count)],
                "name": name,
                "hovertemplate": f"<b>{name}</b><br>query %{{y}}<br>key %{{x}}<br>"
                "weight %{z:.4g}<extra></extra>",
                "coloraxis": "coloraxis",
                "hoverongaps": False,
            }
        )
        corner = {"x": x - 0.5, "y": y - 0.5, "xanchor": "left", "yanchor": "bottom"}
        labels.append({"text": name, "showarrow": False, "font": {"size": 10.5}} | corner)
        ends = {"x0": x - 0.5, "x1": x + count - 0.5, "y0": y - 0.5, "y1": y + count - 0.5}
        frames.append({"type": "rect", "line": {"color": style.GRID, "width": 1}} | ends)
    # All at once: plotly reads the whole figure again for each one that is added.
    figure.add_traces(maps)
    names = [f"{place} {_quoted(token)}" for place, token in enumerate(patterns.tokens)]
    hidden = {
        "tickmode": "array",
        "showticklabels": False,
        "ticks": "",
        "showgrid": False,
        "zeroline": False,
        "constrain": "domain",
    }
    figure.update_layout(
        annotations=labels,
        shapes=frames,
        coloraxis=_colour_axis(top, None, down * high * cell),
        # Never shown; a hover takes the names of its query and key from them.
        xaxis=hidden
        | {
            "range": [-0.5, across * wide - 0.5],
            "tickvals": [column * wide + key for column in range(across) for key in range(count)],
            "ticktext": names * across,
            "constraintoward": "left",
        },
        yaxis=hidden
        | {
            "range": [down * high - 0.5, -0.5],
            "tickvals": [
                row * high + _NAME / cell + query for row in range(down) for query in range(count)
            ],
            "ticktext": names * down,
            "scaleanchor": "x",
            "constraintoward": "top",
        },
    )
    return figure


def visible(token: str) -> str:
    """The token with what cannot be seen made visible: line breaks, tabs, spaces alone."""
    shown = token.replace("\n", "↵").replace("\r", "↵").replace("\t", "⇥")
    if not shown:
        return "(empty)"
    return shown if shown.strip() else "␣" * len(shown)


def _quoted(token: str) -> str:
    return literal(f"“{visible(token)}”")


def _short(text: str) -> str:
    text = text.strip()
    return text if len(text) <= _LABEL else text[: _LABEL - 1] + "…"


def _origin(patterns: Patterns) -> str:
    return f"{patterns.model}, {patterns.inputs}, unit: {UNIT}, n = 1 text, seed {patterns.seed}"


def _allowed(patterns: Patterns, layer: int) -> Bool[np.ndarray, "query key"] | None:
    """Which keys a layer's queries may attend to, where the result says so."""
    count = len(patterns.tokens)
    if not patterns.params.get("causal"):
        return None
    allowed = np.tri(count, dtype=bool)
    windows = patterns.params.get("windows")
    if isinstance(windows, list) and layer < len(windows) and isinstance(windows[layer], int):
        allowed &= ~np.tri(count, k=-windows[layer], dtype=bool)
    return allowed


def _grid(
    pattern: Float[np.ndarray, "query key"], allowed: Bool[np.ndarray, "query key"] | None
) -> list[list[float | None]]:
    """The weights as drawn. Weight where none is allowed is a fault, and is shown."""
    rows = [[drawable(weight) for weight in row] for row in pattern.tolist()]
    if allowed is None:
        return rows
    return [
        [weight if may or weight != 0 else None for weight, may in zip(row, seen, strict=True)]
        for row, seen in zip(rows, allowed.tolist(), strict=True)
    ]


def _has_blank(grid: list[list[float | None]]) -> bool:
    return any(weight is None for row in grid for weight in row)


def _notes(
    drawn: Sequence[tuple[str, Float[np.ndarray, "query key"]]], top: float | int
) -> list[str]:
    told = []
    for name, pattern in drawn:
        if missing := int((~np.isfinite(pattern)).sum()):
            told.append(f"{name}blank, not finite: {missing:,} of {pattern.size:,} weights.")
        if above := int((pattern > top * (1 + 1e-6)).sum()):
            told.append(f"{name}above {top:g}, the end of the colours: {above:,} weights.")
        sums = pattern.sum(axis=1, dtype=np.float64)
        if odd := int((np.abs(sums - 1.0) > _SUM).sum()):
            told.append(
                f"{name}not adding up to 1, as attention does: {odd:,} of {len(sums):,} rows."
            )
    return [note[:1].upper() + note[1:] for note in told]


def _not_drawn(left_out: Sequence[object]) -> list[str]:
    if not left_out:
        return []
    named = ", ".join("L" + str(label).replace(".", "H") for label in left_out[:24])
    more = ", …" if len(left_out) > 24 else ""
    return [f"Not drawn, their patterns were left out: {named}{more} ({len(left_out)} heads)."]


def _check_top(top: float | int) -> None:
    if not 0 < top <= 1:
        raise AnalysisError(f"top = {top}: the end of the colours is above 0 and at most 1")


def _colours_say(top: float | int) -> str:
    return f"Colours go from 0 to {top:g}."


def _colour_axis(
    top: float | int, size: int | None, grid_height: float | None = None
) -> dict[str, object]:
    """Beside a map of `size` pixels, or below a grid of that height."""
    bar: dict[str, object] = {
        "thickness": 12,
        "outlinewidth": 0,
        "ticklen": 3,
        "nticks": 6 if size is None or size > 160 else 3,
        "title": {"text": "weight", "side": "top"},
    }
    if grid_height is not None:
        bar |= {
            "orientation": "h",
            "thickness": 10,
            "lenmode": "pixels",
            "len": 220,
            "x": 0,
            "xanchor": "left",
            "y": -2 / grid_height,
            "yanchor": "top",
        }
    return {"cmin": 0, "cmax": top, "colorscale": style.SEQUENTIAL, "colorbar": bar}
