// The chosen head: its scores beside those of all others, and how they changed while training.

// The heads with a value, the strongest first: an effect counts by its size, a score by its value.
function ranked(score, beyond = () => 0) {
  const values = valuesOf(score);
  const size = (index) => (score.effect ? Math.abs(values[index]) : values[index] - beyond(index));
  return [...values.keys()].filter((index) => values[index] !== null).sort((a, b) => size(b) - size(a) || a - b);
}

// "3 of 270"; equal heads share the better rank.
function rankOf(score) {
  const size = (value) => (score.effect ? Math.abs(value) : value);
  const all = valuesOf(score).filter((value) => value !== null).map(size);
  const own = size(valuesOf(score)[now.head]);
  return `${1 + all.filter((value) => value > own).length} of ${all.length}`;
}

// An element of a drawing. The namespace is that of a drawing the page has, so no address is written.
function svg(tag, attributes, ...children) {
  const element = document.createElementNS(byId("ex-drawing").namespaceURI, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

// A line with a tick for each head, the chosen one bold, its null dotted; the ends are labelled.
function strip(score) {
  const width = 132, values = valuesOf(score);
  const finite = values.filter((value) => value !== null);
  const low = Math.min(0, ...finite), high = Math.max(0, ...finite);
  const at = (value) => (high > low ? 3 + ((value - low) / (high - low)) * (width - 6) : 3);
  const tick = (value, kind, top, bottom) => svg("line", {x1: at(value), x2: at(value), y1: top, y2: bottom, class: kind});
  const own = nullsOf(score)[now.head] ?? null;
  return svg("svg", {class: "strip", viewBox: `0 0 ${width} 34`, width, height: 34, "aria-hidden": "true"},
    svg("line", {x1: 0, x2: width, y1: 16, y2: 16, class: "base"}),
    ...finite.map((value) => tick(value, "other", 8, 16)),
    ...(own === null ? [] : [tick(Math.max(low, Math.min(high, own)), "null", 2, 18)]),
    tick(values[now.head], "own", 2, 18),
    svg("text", {x: 0, y: 31}, written(low, 2)), svg("text", {x: width, y: 31, "text-anchor": "end"}, written(high, 2)));
}

function scoreRow(score) {
  const value = valuesOf(score)[now.head] ?? null;
  const error = rowAt(score.errors, now.step)?.[now.head] ?? null;
  const own = nullsOf(score)[now.head] ?? null;
  const name = el("th", {scope: "row"}, plain(score.name), ...(score.unit ? [el("small", {}, score.unit)] : []));
  if (value === null) return el("tr", {}, name, el("td", {colspan: 3}, isGone(now.head) ? "pruned" : "not measured"));
  return el("tr", {}, name,
    el("td", {class: "number"}, written(value), ...(error === null ? [] : [el("small", {}, `± ${written(error, 2)}`)])),
    el("td", {class: "number"}, own === null ? "–" : written(own)),
    el("td", {class: "rank"}, rankOf(score), strip(score)));
}

function showHead() {
  const {scores, name} = theSubject();
  byId("ex-name").replaceChildren(nameOf(now.head), " ",
    el("small", {}, isGone(now.head) ? `pruned from ${name}` : name));
  const measured = scores.filter((score) => !score.effect), effects = scores.filter((score) => score.effect);
  const [body, effectBody] = byId("ex-scores").tBodies;
  body.replaceChildren(...measured.map(scoreRow));
  const heading = el("tr", {}, el("th", {scope: "rowgroup", colspan: 4, class: "group"}, "What ablating it does"));
  const none = el("tr", {}, el("td", {colspan: 4}, "Nothing in this report ablates single heads."));
  effectBody.replaceChildren(heading, ...(effects.length ? effects.map(scoreRow) : [none]));
  // Scores that were measured in one go share a line.
  const methods = [...new Set(scores.map(({about}) => about))];
  byId("ex-methods").replaceChildren(...methods.map((about) => el("li", {},
    el("b", {}, scores.filter((score) => score.about === about).map(({name}) => plain(name)).join("; ")),
    `: ${sentence(about)}`)));
  showTop();
}

const TOP = 8;

function showTop() {
  const score = theScore();
  const values = score ? valuesOf(score) : [], nulls = score ? nullsOf(score) : [];
  const hasNulls = !score?.effect && nulls.some((value) => value !== null);
  const order = score ? ranked(score, (index) => (hasNulls ? nulls[index] ?? 0 : 0)).slice(0, TOP) : [];
  byId("ex-top-box").hidden = !order.length;
  byId("ex-top-title").textContent = score?.effect ? "Largest effects" : hasNulls ? "Furthest above the null" : "Highest";
  const held = byId("ex-top").contains(document.activeElement);
  byId("ex-top").replaceChildren(...order.map((index) => {
    const button = headButton(index, " ", el("small", {}, written(values[index], 3)));
    button.setAttribute("aria-pressed", String(index === now.head));
    return button;
  }));
  // The button that was pressed is another one now.
  if (held) byId("ex-top").querySelector('[aria-pressed="true"]')?.focus();
}

// The score of the chosen head over the run, over those of all others.
function showCurve() {
  const {steps} = theSubject(), score = theScore();
  const shown = Boolean(steps.length > 1 && score && score.values.length > 1);
  byId("ex-curve-box").hidden = !shown;
  if (!shown) return;
  const x = [], y = [];
  for (const index of score.values[0].keys()) {
    if (index === now.head) continue;
    // One trace for all: a gap between two heads is as good as a trace each, and far quicker.
    x.push(...steps, null);
    y.push(...score.values.map((row) => row[index]), null);
  }
  const own = score.values.map((row) => row[now.head]);
  const bold = look.accent[isDark() ? 1 : 0];
  const line = {
    type: "line", xref: "x", yref: "paper", x0: steps[now.step], x1: steps[now.step], y0: 0, y1: 1,
    line: {color: look.ink, width: 1, dash: "dot"},
  };
  const grid = {gridcolor: look.grid, zeroline: true, zerolinecolor: look.grid};
  byId("ex-curve-title").textContent = `${plain(score.name)} of ${nameOf(now.head)} over training`;
  byId("explorer-curve").setAttribute("aria-label",
    `${plain(score.name)} of ${nameOf(now.head)} over steps, all other heads in grey.`);
  Plotly.react("explorer-curve", [
    {type: "scatter", mode: "lines", x, y, line: {color: look.ink, width: 0.8}, opacity: 0.7, hoverinfo: "skip"},
    {
      type: "scatter", mode: "lines", x: steps, y: own, line: {color: bold, width: 2.5},
      hovertemplate: `step %{x:,}<br>${nameOf(now.head)} %{y:.4g}<extra></extra>`,
    },
  ], explorerLayout({
    height: 230, margin: {l: 46, r: 8, t: 8, b: 42}, showlegend: false, shapes: [line],
    xaxis: {title: {text: "step", standoff: 6}, ...grid}, yaxis: grid,
  }), settings);
}
