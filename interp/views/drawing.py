"""The figure of any result, and what a notebook shows of one.

One invariant: a notebook always gets an answer; a result without anything to draw is told in words.
"""

import base64
import hashlib
import html
import json
import zlib
from collections.abc import Iterable
from dataclasses import replace
from functools import cache

import pandas as pd
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs, get_plotlyjs_version

from interp.comparison.result import Comparison
from interp.errors import AnalysisError
from interp.patterns import Patterns
from interp.tables import HeadScores, Result
from interp.views.ablation_words import HEAD_TABLES, noun
from interp.views.figures import style
from interp.views.figures.attention import attention_grid, attention_map
from interp.views.figures.heads import head_heatmap
from interp.views.figures.runs import about
from interp.views.figures.standalone import plain_words, standalone
from interp.views.pages.comparison import compare_page
from interp.views.pages.page import Part, Plot, Words
from interp.views.pages.scores import result_parts

MIME = "application/vnd.plotly.v1+json"

_CONFIG = {"responsive": True, "displaylogo": False}


def figure(
    result: Result | Comparison,
    *,
    column: str | None = None,
    layer: int | None = None,
    head: int | None = None,
) -> go.Figure:
    """The main figure of a result, an ordinary plotly figure that can be restyled.

    Head scores give their layer × head map, of another `column` if that is named; ablations of
    heads and of sets the first figure of their page; a comparison the maps of its first score, or
    of the score that `column` names; patterns a grid of all heads, or with `layer` and `head` that
    head's. How to read it is in `layout.meta["caption"]`, what is missing in
    `layout.meta["notes"]`.

    Raises:
        AnalysisError: there is nothing to draw, no such column or head, or the choice is not one
            that this kind of result has.
    """
    if (layer is None) != (head is None):
        raise AnalysisError("layer and head choose a pattern together: both are needed")
    if isinstance(result, Comparison):
        _no_pattern(layer, "a comparison")
        return _of_comparison(result, column)
    if layer is not None and head is not None:
        if not isinstance(result, Patterns):
            _no_pattern(layer, f"{result.analysis} of {result.model}")
        elif column is not None:
            raise AnalysisError("either a column, or the pattern of a layer and head")
        else:
            return attention_map(result, layer, head)
    if column is not None:
        return _map_of(result, column)
    if isinstance(result, Patterns) and result.drawn:
        return _grid(result)
    return _first(result_parts(result))


def notebook_bundle(result: Result | Comparison) -> dict[str, object]:
    """What a notebook shows of a result, by MIME type, as IPython's `_repr_mimebundle_` wants it.

    Jupyter, VS Code and nteract draw plotly's own type, which is small, needs no network and no
    trust in scripts; a terminal shows the title, the caption and the notes. Colab and nbconvert
    take the HTML, which a notebook's file holds for every output: it carries no plotly.js, and
    fetches it from its public address where the page has none, and checks that it is the known
    file; until then, or without a network, it is words. The words
    are drawn inside the figure, because only one of the types is shown. A result without anything
    to draw has text and HTML alone.
    """
    try:
        drawn = figure(result)
    except AnalysisError as fault:
        return {"text/plain": str(fault), "text/html": _in_words([str(fault)])}
    words = plain_words(drawn)
    whole = _json_of(standalone(drawn))
    return {
        MIME: {**whole, "config": _CONFIG},
        "text/html": _fragment(whole, words, _FETCHED.format(get_plotlyjs_version(), _digest())),
        "text/plain": "\n".join(words),
    }


def notebook_html(result: Result | Comparison) -> str:
    """A result's figure as an HTML fragment that draws itself, with its words; no network needed.

    It carries plotly.js, deflated, about 2 MB, which is unpacked only where the page has none yet.
    Same results give the same bytes.
    """
    try:
        drawn = figure(result)
    except AnalysisError as fault:
        return _in_words([str(fault)])
    whole = _json_of(standalone(drawn))
    return _fragment(whole, plain_words(drawn), _CARRIED.format(_packed_library()))


def _no_pattern(layer: int | None, what: str) -> None:
    if layer is not None:
        raise AnalysisError(f"layer and head choose a pattern, and {what} holds none")


def _of_comparison(result: Comparison, column: str | None) -> go.Figure:
    if column is not None:
        if column not in result.units:
            raise AnalysisError(f"no score {column!r} here; there are {', '.join(result.scores)}")
        result = replace(result, units={column: result.units[column]})
    if not any(result.table[score].notna().any() for score in result.scores):
        raise AnalysisError("nothing to draw: no head has a finite value")
    return _first(part for section in compare_page(result).sections for part in section.parts)


def _first(parts: Iterable[Part]) -> go.Figure:
    parts = list(parts)
    for part in parts:
        if isinstance(part, Plot):
            return part.figure
    told = " ".join(part.text for part in parts if isinstance(part, Words))
    raise AnalysisError(told or "nothing to draw")


def _grid(patterns: Patterns) -> go.Figure:
    """All heads, or as many as a figure can hold, the furthest from uniform first."""
    fit = style.MOST_CELLS // max(len(patterns.tokens), 1) ** 2
    if len(patterns.drawn) <= fit:
        return attention_grid(patterns)
    if not fit:
        return _map_of(patterns, patterns.score)
    drawn = attention_grid(patterns, patterns.drawn[:fit])
    note = f"Drawn: the {fit} heads furthest from even attention, of {len(patterns.drawn)}."
    meta = drawn.layout.meta
    return drawn.update_layout(meta={**meta, "notes": [note, *meta["notes"]]})


def _map_of(result: Result, column: str) -> go.Figure:
    """The layer × head map of any column of numbers."""
    table = result.table
    if not isinstance(result, HeadScores):
        raise AnalysisError(f"a column is chosen of a table of heads; {result.analysis} is of sets")
    known = [name for name in table.select_dtypes("number") if name not in ("layer", "head")]
    if column not in known:
        raise AnalysisError(f"no column {column!r} of numbers; there are {', '.join(known)}")
    values = pd.to_numeric(table[column])
    if not values.notna().any():
        raise AnalysisError(f"nothing to draw: no head has a finite {column}")
    # Of the other columns the result does not say the unit.
    kin = (result.score, f"{result.score}_se", f"{result.score}_null")
    unit = result.unit if column in kin else ""
    effect = result.analysis in HEAD_TABLES and column == result.score
    told = (result.model, about(table, unit), f"seed {result.seed}")
    called = column.replace("_", " ")
    return head_heatmap(
        table,
        column,
        title=f"{called[:1].upper()}{called[1:]} by {noun(result)}",
        subtitle=", ".join(filter(None, told)),
        unit=unit,
        diverging=effect or bool((values < 0).any()),
        noun=noun(result),
        quantity=called,
        subject=result.model if noun(result) == "head" else "",
        pruned=result.pruned_heads,
    )


def _json_of(drawn: go.Figure) -> dict[str, object]:
    plain = json.loads(json.dumps(drawn.to_plotly_json(), allow_nan=False))
    return {"data": plain["data"], "layout": plain["layout"]}


def _in_words(words: Iterable[str]) -> str:
    return "".join(f"<p>{html.escape(text)}</p>" for text in words)


def _fragment(whole: dict[str, object], words: list[str], library: str) -> str:
    text = json.dumps(whole, ensure_ascii=True, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    name = hashlib.sha256(text.encode("ascii")).hexdigest()[:12]
    layout = whole["layout"]
    assert isinstance(layout, dict)
    return _FRAGMENT.format(
        name=name,
        width=layout["width"],
        height=layout["height"],
        label=html.escape(words[0], quote=True) if words else "",
        words=_in_words(words),
        library=library,
        figure=text,
        config=json.dumps(_CONFIG),
    )


@cache
def _digest() -> str:
    """What a browser checks the fetched library against."""
    return base64.b64encode(hashlib.sha256(get_plotlyjs().encode("utf-8")).digest()).decode("ascii")


@cache
def _packed_library() -> str:
    packed = zlib.compress(get_plotlyjs().encode("utf-8"), 9)
    return base64.b64encode(packed).decode("ascii")


# Two ways to plotly.js, as promises. A notebook's own module loader is kept from catching it.
_CARRIED = """(async () => {{
      const packed = Uint8Array.from(atob("{}"), (letter) => letter.charCodeAt(0));
      const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
      const module = {{exports: {{}}}};
      new Function("module", "exports", "define", await new Response(stream).text())(
        module, module.exports, undefined);
      window.Plotly = module.exports;
    }})()"""
_FETCHED = """fetch("https://cdn.plot.ly/plotly-{}.min.js", {{integrity: "sha256-{}"}})
      .then((answer) => answer.text())
      .then((code) => {{
        const module = {{exports: {{}}}};
        new Function("module", "exports", "define", code)(module, module.exports, undefined);
        window.Plotly = module.exports;
      }})"""

# Every copy of one output is filled, and one that stands empty is told in words meanwhile.
_FRAGMENT = """\
<div class="interp-{name}" role="figure" aria-label="{label}" \
style="width:{width}px;max-width:100%;min-height:{height}px">\
<div class="interp-words tex2jax_ignore">{words}</div></div>
<script>
(async () => {{
  const figure = {figure};
  const places = () => [...document.querySelectorAll(".interp-{name}")].filter(
    (place) => place.firstElementChild?.classList.contains("interp-words"));
  try {{
    if (!window.Plotly?.newPlot) {{
      window.interpPlotly ??= {library};
      await window.interpPlotly;
    }}
    for (const place of places()) {{
      const words = place.firstElementChild;
      place.replaceChildren();
      try {{
        await Plotly.newPlot(place, figure.data, figure.layout, {config});
      }} catch (fault) {{
        place.replaceChildren(words);
        throw fault;
      }}
    }}
  }} catch (fault) {{
    window.interpPlotly = undefined;  // a later output tries again
    console.warn("interp: a figure stays words,", fault.message);
    for (const place of places()) {{
      if (place.querySelector(".interp-why")) continue;
      const why = document.createElement("p");
      why.className = "interp-why";
      why.textContent = "The figure itself needs plotly.js, and could not be drawn here.";
      place.firstElementChild.append(why);
    }}
  }}
}})();
</script>
"""
