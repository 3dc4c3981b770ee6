// The chosen head's attention on the example text, as a matrix. Patterns lie in the page packed, and
// only the one shown is unpacked.

let shown = null; // {weights, size, tokens, seen} of the pattern on view
let asked = 0; // unpacking takes a moment, and only the last one asked for is shown

// A token as a tick label: white space is visible, and long ones are cut.
function visible(token, most = 12) {
  const text = token.replace(/ /g, "·").replace(/\n/g, "↵").replace(/\t/g, "⇥") || "∅";
  return [...text].length > most ? `${[...text].slice(0, most - 1).join("")}…` : text;
}

// Where a token is and what it is: equal tokens differ by their positions.
const placed = (position, token) => `${position} ${JSON.stringify(token)}`;

// The number of the text to show: at a step of a run, that of the last checkpoint until then.
function textNumber() {
  const {texts, steps} = theSubject();
  const dated = [...texts.keys()].filter((number) => texts[number].step !== null);
  if (!steps.length || !dated.length) return Math.min(now.text, texts.length - 1);
  dated.sort((a, b) => texts[a].step - texts[b].step);
  return dated.findLast((number) => texts[number].step <= steps[now.step]) ?? dated[0];
}

// The keys that a query of a head can see, from the first to before the last, by the head's label.
const reach = (text, label) => (query) => {
  const window = text.windows[Number(label.split(".")[0])] ?? Infinity;
  return [Math.max(0, query + 1 - window), text.causal ? query + 1 : text.tokens.length];
};

// Browsers before 2023 may lack it: the words and the scores do not need it.
const canUnpack = "DecompressionStream" in globalThis;

const packed = (subject, text, label) => byId(`pattern-${subject}-${text}-${label}`);

// Row-major weights [query, key]: 16-bit codes are even steps, those of fewer bits finer where small.
async function unpack(script, bits) {
  const bytes = Uint8Array.from(atob(script.textContent.trim()), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const raw = await new Response(stream).arrayBuffer();
  if (bits < 16) return Float64Array.from(new Uint8Array(raw), (code) => (code / (2 ** bits - 1)) ** 2);
  const view = new DataView(raw);
  return Float64Array.from({length: raw.byteLength / 2}, (_, place) => view.getUint16(2 * place, true) / 65535);
}

function showTexts() {
  const {texts, steps} = theSubject();
  byId("ex-text-line").hidden = texts.length < 2 || steps.length > 0;
  byId("ex-text").replaceChildren(...texts.map(({about}, number) => el("option", {value: number}, about)));
  byId("ex-text").value = now.text;
}

async function showPattern() {
  const ticket = ++asked;
  const number = textNumber(), text = theSubject().texts[number];
  const label = nameOf(now.head, false);
  const script = canUnpack && text && packed(now.subject, number, label);
  byId("ex-pattern-box").hidden = byId("ex-toggle").hidden = !script;
  byId("ex-pattern-about").textContent = patternWords(text, Boolean(script));
  if (!script) {
    shown = null;
    return;
  }
  const weights = await unpack(script, text.bits);
  if (ticket !== asked) return;
  shown = {weights, size: text.tokens.length, tokens: text.tokens, seen: reach(text, label)};
  if (now.lines) showLines();
  else await showMatrix();
}

function patternWords(text, embedded) {
  if (!text) return "No pattern is embedded in this report.";
  if (!canUnpack) return "This browser is too old to unpack the patterns in this page; one of 2023 or later can.";
  const {steps} = theSubject();
  const step = text.step === null || !steps.length ? "" : text.step <= steps[now.step]
    ? `Pattern at step ${text.step.toLocaleString("en")}. `
    : `The first embedded pattern is that of step ${text.step.toLocaleString("en")}, later than the slider. `;
  if (!embedded) {
    const count = text.heads.length;
    const few = text.heads.slice(0, 12).map((label) => `L${label.replace(".", "H")}`).join(", ");
    return `${step}The pattern of ${nameOf(now.head)} is not embedded${isGone(now.head) ? ": the head is pruned" : ""}. `
      + `Embedded ${count === 1 ? "is" : "are"} ${few}${count > 12 ? ` and ${count - 12} more` : ""}. ${sentence(text.about)}`;
  }
  const rounding = text.bits === 16 ? "Weights are rounded to 0.00001."
    : `Weights are rounded by at most ${text.bits === 8 ? "0.004" : "0.016"}, finer where small.`;
  return `${step}${sentence(text.about)} ${rounding}`;
}

function showMatrix() {
  const {weights, size, tokens, seen} = shown;
  const plot = byId("explorer-pattern");
  const z = Array.from({length: size}, (_, query) => {
    const [first, end] = seen(query);
    // What a query cannot see is blank, which is not a small weight; a weight there is shown as any.
    return Array.from(weights.subarray(query * size, (query + 1) * size), (weight, key) => (
      weight > 0 || (key >= first && key < end) ? weight : null));
  });
  const blank = z.some((row) => row.includes(null));
  const largest = weights.reduce((most, weight) => Math.max(most, weight), 0);
  const labels = tokens.map((token, position) => literal(placed(position, token)));
  const side = Math.min(plot.clientWidth || 480, 600);
  // A label takes 13 pixels.
  const tickvals = everyFew(size, Math.max(4, Math.floor((side - 110) / 13)));
  const axis = (title, range) => ({
    title: {text: title, standoff: 8}, tickmode: "array", tickvals, ticks: "",
    ticktext: tickvals.map((position) => literal(visible(tokens[position]))),
    tickfont: {size: 11}, showgrid: false, zeroline: false, automargin: true, range,
  });
  const trace = {
    type: "heatmap", z, zmin: 0, zmax: largest || 1, colorscale: scaleNow(false),
    // Rows share the keys' labels: a label for each cell of 512 tokens would be a quarter million.
    customdata: z.map(() => labels), text: labels.map((label) => Array(size).fill(label)),
    hovertemplate: "query %{text}<br>key %{customdata}<br>weight %{z:.3f}<extra></extra>",
    colorbar: {thickness: 12, outlinewidth: 0, ticklen: 3, nticks: 5},
    hoverongaps: false, xgap: size > 40 ? 0 : 1, ygap: size > 40 ? 0 : 1,
  };
  plot.style.height = `${side}px`;
  plot.setAttribute("aria-label", `Attention of ${nameOf(now.head)}: a row a query, a column a key. `
    + "Arrow keys move over the cells.");
  plot.blankWords = (query, key) => `query ${placed(query, tokens[query])} cannot see key ${placed(key, tokens[key])}`;
  byId("ex-pattern-said").textContent = `A row is a query, a column a key${blank ? " (blank: one it cannot see)" : ""}; `
    + `colour runs from 0 to the largest weight here, ${written(largest, 3)}. In the labels · is a space and ↵ a line break`
    + (tickvals.length < size ? `; one token in ${tickvals[1] - tickvals[0]} is labelled.` : ".");
  const layout = explorerLayout({
    height: side, margin: {l: 40, r: 4, t: 6, b: 40},
    xaxis: {...axis("key", [-0.5, size - 0.5]), tickangle: -90},
    yaxis: axis("query", [size - 0.5, -0.5]),
  });
  return Plotly.react(plot, [trace], layout, settings).then(() => {
    if (!plot.listening) listen(plot);
    plot.listening = true;
  });
}

function showView(lines) {
  now.lines = lines;
  byId("ex-matrix").setAttribute("aria-pressed", String(!lines));
  byId("ex-as-lines").setAttribute("aria-pressed", String(lines));
  byId("explorer-pattern").hidden = lines;
  byId("ex-pattern-said").hidden = lines;
  byId("ex-lines").hidden = !lines;
  return showPattern();
}

function startPattern() {
  byId("ex-matrix").addEventListener("click", () => showView(false));
  byId("ex-as-lines").addEventListener("click", () => showView(true));
  byId("ex-text").addEventListener("change", (event) => choose({text: Number(event.target.value)}));
  startLines();
}
