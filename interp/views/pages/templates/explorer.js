// The explorer: which head of which model is looked at, by which score, at which step. Everything
// shown hangs on `now`; `choose` changes it and shows what depends on the change.

const {subjects, look} = JSON.parse(byId("explorer-data").textContent);
const now = {subject: 0, score: 0, head: 0, step: 0, text: 0, lines: false};

const theSubject = () => subjects[now.subject];
const theScore = () => theSubject().scores[now.score];
const nameOf = (index, letters = true) => {
  const {n_heads} = theSubject();
  const layer = Math.floor(index / n_heads), head = index % n_heads;
  return letters ? `L${layer}H${head}` : `${layer}.${head}`;
};
const isGone = (index) => theSubject().gone.includes(nameOf(index, false));
// A score that was measured once has one row for all steps.
const rowAt = (rows, step) => rows && (rows.length > 1 ? rows[step] : rows[0]);
const valuesOf = (score) => rowAt(score.values, now.step) ?? [];
const nullsOf = (score) => rowAt(score.nulls, now.step) ?? [];
const plain = (name) => name.replace(/_/g, " ");

// What a result says of itself may begin without a capital and end without a full stop.
const sentence = (words) => (words && words[0].toUpperCase() + words.slice(1)
  + (/[.!?]["”’)]?$/.test(words) ? "" : "."));

// A number as the page's tables write it: 4 digits, thousands separated, a true minus.
function written(value, digits = 4) {
  if (value === null || value === undefined) return "not measured";
  const size = Math.abs(value), short = Number(value.toPrecision(digits));
  const text = size >= 1000 ? Math.round(value).toLocaleString("en")
    : size && size < 1e-4 ? short.toExponential() : String(short);
  return text.replace(/-/g, "−");
}

function shortCount(count) {
  for (const [size, letter] of [[1e9, "B"], [1e6, "M"], [1e3, "k"]]) {
    if (count >= size) return `${Number((count / size).toPrecision(3))}${letter}`;
  }
  return String(count);
}

const scaleNow = (diverging) => look[diverging ? "diverging" : "sequential"][isDark() ? 1 : 0];

function explorerLayout(more) {
  const layout = {
    font: {family: look.font, size: 12}, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    hoverlabel: {namelength: -1, font: {family: look.font, size: 12}}, autosize: true,
    ...(touch ? {dragmode: false} : {}), ...more,
  };
  return set(layout, isDark() ? look.dark : look.light);
}

// At most `most` numbers of a range of positions, evenly spaced from 0.
function everyFew(count, most) {
  const every = Math.max(1, Math.ceil(count / most));
  return Array.from({length: Math.ceil(count / every)}, (_, place) => place * every);
}

function showMap() {
  const {name, n_layers, n_heads, steps} = theSubject();
  const plot = byId("explorer-map");
  const score = theScore();
  byId("ex-map-title").textContent = score ? `${plain(score.name)} by head` : "Heads";
  const values = score ? valuesOf(score) : [];
  const z = Array.from({length: n_layers}, (_, layer) =>
    Array.from({length: n_heads}, (_, head) => values[layer * n_heads + head] ?? null));
  const index = (count, title, most) => {
    const tickvals = everyFew(count, most);
    return {
      title: {text: title, standoff: 6}, tickmode: "array", tickvals, ticktext: tickvals.map(String),
      tickangle: 0, ticks: "", showgrid: false, zeroline: false, range: [-0.5, count - 0.5],
    };
  };
  const meta = steps.length ? {subject: name, step: steps[now.step]} : {subject: name};
  const trace = {
    type: "heatmap", z, x: z[0].map((_, head) => head), y: z.map((_, layer) => layer), meta,
    customdata: z.map((row, layer) => row.map((_, head) => [layer, head])),
    hovertemplate: "layer %{customdata[0]}, head %{customdata[1]}"
      + `<br>${literal(plain(score?.name ?? ""))} %{z:.4g}<extra></extra>`,
    coloraxis: "coloraxis", hoverongaps: false, xgap: 1.5, ygap: 1.5,
  };
  const cell = Math.max(16, Math.min(30, 420 / n_layers));
  const inside = Math.max(72, Math.round(cell * n_layers));
  const layout = explorerLayout({
    height: inside + 56, margin: {l: 46, r: 8, t: 8, b: 48},
    xaxis: index(n_heads, "head", 16), yaxis: {...index(n_layers, "layer", 16), range: [n_layers - 0.5, -0.5]},
    coloraxis: {
      cmin: score?.low ?? 0, cmax: score?.high ?? 1, colorscale: scaleNow(score?.diverging),
      colorbar: {thickness: 12, outlinewidth: 0, ticklen: 3, ...barTicks(n_layers, score)},
    },
  });
  plot.style.height = `${inside + 56}px`;
  plot.setAttribute("aria-label", `Map of all heads. Arrow keys move over them, Enter chooses one.`);
  byId("ex-map-about").textContent = score
    ? `${sentence(score.about)} ${score.unit ? `Unit: ${score.unit}. ` : ""}${blanks(values)}` : "No score was measured.";
  return Plotly.react(plot, [trace], layout, settings).then(markChosen);
}

// The bar is as high as the map: one of few layers leaves room for its ends.
function barTicks(n_layers, score) {
  if (n_layers > 3 || !score) return {nticks: 5};
  const tickvals = [score.low, score.high];
  return {tickmode: "array", tickvals, ticktext: tickvals.map((value) => written(value, 2))};
}

// Which cells are blank, and why.
function blanks(values) {
  const {n_layers, n_heads, gone} = theSubject();
  const missing = Array.from({length: n_layers * n_heads}, (_, index) => index)
    .filter((index) => (values[index] ?? null) === null && !isGone(index));
  const listed = missing.slice(0, 8).map((index) => nameOf(index)).join(", ");
  const more = missing.length > 8 ? ` and ${missing.length - 8} more` : "";
  const told = [];
  if (gone.length) told.push(`pruned: ${gone.map((label) => `L${label.replace(".", "H")}`).join(", ")}`);
  if (missing.length) told.push(`not measured: ${listed}${more}`);
  return told.length ? `Blank: ${told.join("; ")}.` : "";
}

function markChosen() {
  const plot = byId("explorer-map");
  const {n_heads} = theSubject();
  plot.chosenCell = [Math.floor(now.head / n_heads), now.head % n_heads];
  if (plot.data) frame(plot, "chosen", plot.data[0], ...plot.chosenCell);
}

function showSteps() {
  const {steps, tokens} = theSubject();
  byId("ex-steps").hidden = !steps.length;
  if (!steps.length) return;
  const slider = byId("ex-step");
  slider.max = steps.length - 1;
  slider.value = now.step;
  const seen = tokens.length ? `, ${shortCount(tokens[now.step])} tokens seen` : "";
  const words = `step ${steps[now.step].toLocaleString("en")} of ${steps.at(-1).toLocaleString("en")}${seen}`;
  byId("ex-step-told").textContent = words;
  slider.setAttribute("aria-valuetext", words);
}

function showScoreNames() {
  const {scores} = theSubject();
  const group = (effect) => scores.flatMap((score, number) => (score.effect === effect
    ? [el("option", {value: number}, plain(score.name))] : []));
  const effects = group(true);
  byId("ex-score").replaceChildren(...group(false),
    ...(effects.length ? [el("optgroup", {label: "What ablating does"}, ...effects)] : []));
  byId("ex-score").value = now.score;
}

// Changes what is looked at; `asked` says that the reader chose a head, which the address then names.
function choose(change, asked = false) {
  if (change.subject !== undefined && change.subject !== now.subject) {
    const score = theScore()?.name;
    now.subject = change.subject;
    const {scores, steps} = theSubject();
    now.score = Math.max(0, scores.findIndex(({name}) => name === score));
    now.step = Math.max(0, steps.length - 1);
    now.text = 0;
    now.head = change.head ?? strongest();
    byId("ex-subject").value = now.subject;
    showScoreNames();
    Object.assign(now, change);
    showTexts();
  } else {
    Object.assign(now, change);
  }
  // A layer's list of heads stays while the keyboard is in it.
  if (!byId("ex-layer").contains(document.activeElement)) byId("ex-layer").replaceChildren();
  showSteps();
  showHead();
  showThumbnails();
  showCurve();
  if (asked) {
    const score = theScore();
    const value = score && (valuesOf(score)[now.head] ?? null);
    const told = !score ? "" : `, ${plain(score.name)} ${written(value)}${value === null ? "" : `, ${rankOf(score)}`}`;
    byId("ex-answer").textContent = `${nameOf(now.head)}${isGone(now.head) ? ", pruned" : told}`;
    const several = subjects.length > 1 ? `&subject=${encodeURIComponent(theSubject().name)}` : "";
    try {
      history.replaceState(null, "", `#head=${nameOf(now.head, false)}${several}`);
    } catch {
      // A page inside a notebook's frame may not have an address of its own.
    }
  }
  return Promise.all([showMap(), showPattern()]);
}

// The head with the highest value of the first score.
function strongest() {
  const score = theSubject().scores[0];
  const ordered = score ? ranked(score) : [];
  return ordered.length ? ordered[0] : 0;
}

// A head or a layer as one writes it: 5.1, L5H1, 5, L5.
function find(text) {
  const {n_layers, n_heads} = theSubject();
  const [, layer, head] = text.trim().match(/^L?(\d+)(?:\s*[.,:H]\s*(\d+))?$/i) ?? [];
  const range = `layers 0 to ${n_layers - 1} and heads 0 to ${n_heads - 1}`;
  if (layer === undefined) {
    byId("ex-answer").textContent = `Write a head as 5.1 or L5H1, or a layer as 5; here are ${range}.`;
  } else if (layer >= n_layers || (head ?? 0) >= n_heads) {
    const wanted = head === undefined ? `layer ${layer}` : `head ${layer}.${head}`;
    byId("ex-answer").textContent = `There is no ${wanted} here, only ${range}.`;
  } else if (head !== undefined) {
    choose({head: layer * n_heads + Number(head)}, true);
  } else {
    byId("ex-answer").textContent = `Layer ${Number(layer)} has ${n_heads} ${n_heads === 1 ? "head" : "heads"}:`;
    byId("ex-layer").replaceChildren(...Array.from({length: n_heads}, (_, place) =>
      headButton(layer * n_heads + place)));
  }
}

function headButton(index, ...more) {
  return el("button", {type: "button", onclick: () => choose({head: index}, true)}, nameOf(index), ...more);
}

function readAddress() {
  const wanted = new URLSearchParams(location.hash.slice(1));
  const label = wanted.get("head");
  if (!label) return null;
  const subject = Math.max(0, subjects.findIndex(({name}) => name === wanted.get("subject")));
  const [layer, head] = label.split(".").map(Number);
  const {n_layers, n_heads} = subjects[subject];
  return layer < n_layers && head < n_heads ? {subject, head: layer * n_heads + head} : null;
}

// A map elsewhere in the page was clicked: the head is shown here, with a way back.
function comeFrom({subject, step, layer, head, from}) {
  const number = subjects.findIndex(({name}) => name === subject);
  if (number < 0) return;
  const {n_heads, steps} = subjects[number];
  const logged = steps.indexOf(step);
  choose({subject: number, head: layer * n_heads + head, ...(logged < 0 ? {} : {step: logged})}, true);
  if (from.id === "explorer-map") return;
  const heading = from.closest("section").querySelector("h2").textContent;
  const back = byId("ex-back");
  back.hidden = false;
  back.replaceChildren(el("a", {
    href: `#${from.id}`,
    onclick: (event) => {
      event.preventDefault();
      from.scrollIntoView({behavior: motion, block: "center"});
      from.focus({preventScroll: true});
      back.hidden = true;
    },
  }, `Back to ${heading}`));
  byId("explorer-panel").scrollIntoView({behavior: motion});
  byId("ex-name").focus({preventScroll: true});
}

// Draws what is shown once more, at once: paper does not wait for a pattern to be unpacked.
function repaint() {
  showMap();
  showCurve();
  if (shown && !now.lines) showMatrix();
}

function startExplorer() {
  byId("ex-subject").replaceChildren(...subjects.map(({name}, number) => el("option", {value: number}, name)));
  byId("ex-subject-line").hidden = subjects.length < 2;
  byId("ex-subject").addEventListener("change", (event) => choose({subject: Number(event.target.value)}, true));
  byId("ex-score").addEventListener("change", (event) => choose({score: Number(event.target.value)}));
  byId("ex-step").addEventListener("input", (event) => choose({step: Number(event.target.value)}));
  byId("ex-find").addEventListener("submit", (event) => {
    event.preventDefault();
    find(byId("ex-head").value);
  });
  const beside = (by) => {
    const count = theSubject().n_layers * theSubject().n_heads;
    choose({head: (now.head + by + count) % count}, true);
  };
  byId("ex-previous").addEventListener("click", () => beside(-1));
  byId("ex-next").addEventListener("click", () => beside(1));
  startPattern();
  document.addEventListener("choose-head", (event) => comeFrom(event.detail));
  addEventListener("hashchange", () => {
    const wanted = readAddress();
    if (wanted) choose(wanted);
  });
  scheme.addEventListener("change", () => {
    forgetThumbnails();
    choose({});
  });
  for (const moment of ["beforeprint", "afterprint"]) addEventListener(moment, repaint);
  now.step = Math.max(0, theSubject().steps.length - 1);
  now.head = strongest();
  showScoreNames();
  showTexts();
  const wanted = readAddress();
  choose(wanted ?? {}).then(() => {
    const map = byId("explorer-map");
    listen(map);
    map.on("plotly_afterplot", markChosen);
    document.documentElement.dataset.explorer = "ready";
  });
  if (wanted) byId("explorer-panel").scrollIntoView();
}
