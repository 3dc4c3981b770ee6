// The chosen head's attention as lines from queries (left) to keys (right), after BertViz's head view.

const FAINT = 0.02; // lighter lines are not drawn
const AT_ONCE = 120; // tokens; of a longer text a window is shown
const ROW = 24; // pixels
let from = 0; // the first token of the window

const lastShown = () => Math.min(from + AT_ONCE, shown.size);

// Only the current button of a row of buttons is a stop of Tab; the arrow keys go to the others.
function rove(container) {
  container.addEventListener("keydown", (event) => {
    const buttons = [...container.querySelectorAll("button")];
    const at = buttons.indexOf(document.activeElement);
    if (at < 0) return;
    // How many stand in one line: those as high up as the first.
    const across = buttons.filter((button) => button.offsetTop === buttons[0].offsetTop).length;
    const by = {ArrowRight: 1, ArrowLeft: -1, ArrowDown: across, ArrowUp: -across}[event.key];
    const next = event.key === "Home" ? 0 : event.key === "End" ? buttons.length - 1 : by && at + by;
    if (next === undefined || !buttons[next]) return;
    event.preventDefault();
    buttons[at].tabIndex = -1;
    buttons[next].tabIndex = 0;
    buttons[next].focus();
  });
}

function tokenColumn(column, side) {
  const {tokens} = shown;
  column.replaceChildren(...tokens.slice(from, lastShown()).map((token, place) => el("button", {
    type: "button", class: "token", tabindex: place ? -1 : 0, "data-side": side, "data-position": from + place,
    "aria-label": `${side} ${placed(from + place, token)}`,
  }, visible(token, 16), el("small", {}, String(from + place)))));
}

function showLines() {
  const {size} = shown;
  if (from >= size) from = 0;
  byId("ex-window").hidden = size <= AT_ONCE;
  byId("ex-window-told").textContent = `Tokens ${from} to ${lastShown() - 1} of ${size}`;
  byId("ex-earlier").disabled = from === 0;
  byId("ex-later").disabled = lastShown() === size;
  tokenColumn(byId("ex-queries"), "query");
  tokenColumn(byId("ex-keys"), "key");
  drawLines();
}

// The lines of all tokens, or of one query or key alone.
function drawLines(side = "", position = -1) {
  const {weights, size} = shown;
  const end = lastShown(), height = (end - from) * ROW;
  const lines = [];
  for (let query = from; query < end; query++) {
    if (side === "query" && query !== position) continue;
    for (let key = from; key < end; key++) {
      if (side === "key" && key !== position) continue;
      const weight = weights[query * size + key];
      if (weight < FAINT) continue;
      lines.push(svg("line", {
        x1: 0, x2: 100, y1: (query - from + 0.5) * ROW, y2: (key - from + 0.5) * ROW, "stroke-opacity": weight.toFixed(3),
      }));
    }
  }
  const drawing = byId("ex-drawing");
  drawing.setAttribute("viewBox", `0 0 100 ${height}`);
  drawing.style.height = `${height}px`;
  drawing.replaceChildren(...lines);
  shade(side, position);
  byId("ex-lines-said").textContent = side ? lineWords(side, position)
    : `${lines.length} ${lines.length === 1 ? "line" : "lines"}; those below ${FAINT} are not drawn. Point at a token, `
      + "or go to it with Tab and the arrow keys, to see its lines alone.";
}

// Shades the tokens at the other end by their weight.
function shade(side, position) {
  const {weights, size} = shown;
  for (const button of byId("ex-lines").querySelectorAll(".token")) {
    const other = Number(button.dataset.position);
    const weight = side === "" || button.dataset.side === side ? 0
      : side === "query" ? weights[position * size + other] : weights[other * size + position];
    button.style.setProperty("--weight", weight.toFixed(3));
    button.classList.toggle("on", button.dataset.side === side && other === position);
  }
}

// The strongest weights of a token, over the whole text and not only over the window.
function lineWords(side, position) {
  const {weights, size, tokens} = shown;
  const weight = (other) => (side === "query" ? weights[position * size + other] : weights[other * size + position]);
  const order = [...Array(size).keys()].filter((other) => weight(other) >= FAINT).sort((a, b) => weight(b) - weight(a));
  const told = order.slice(0, 6).map((other) => `${weight(other).toFixed(3)} ${side === "query" ? "to" : "from"} `
    + placed(other, tokens[other]));
  const more = order.length > 6 ? `, and ${order.length - 6} more of at least ${FAINT}` : "";
  const outside = order.filter((other) => other < from || other >= lastShown()).length;
  return `${side === "query" ? "Query" : "Key"} ${placed(position, tokens[position])}: `
    + `${told.join(", ") || `no weight of at least ${FAINT}`}${more}.`
    + (outside ? ` ${outside} of them lie outside the window.` : "");
}

function startLines() {
  const box = byId("ex-lines");
  const only = (event) => {
    const token = event.target.closest?.(".token");
    if (token && shown) drawLines(token.dataset.side, Number(token.dataset.position));
  };
  box.addEventListener("mouseover", only);
  box.addEventListener("focusin", (event) => {
    only(event);
    // Said where the keyboard goes only: a pointer passes over many tokens.
    if (event.target.matches(".token")) say(byId("ex-lines-said").textContent);
  });
  byId("ex-token-lines").addEventListener("mouseleave", () => shown && drawLines());
  byId("ex-token-lines").addEventListener("focusout", () => shown && drawLines());
  const moveWindow = (by) => {
    from = Math.max(0, Math.min(shown.size - AT_ONCE, from + by));
    showLines();
    // At an end of the text the button that was pressed can be pressed no more.
    const [pressed, other] = by < 0 ? ["ex-earlier", "ex-later"] : ["ex-later", "ex-earlier"];
    if (byId(pressed).disabled) byId(other).focus();
  };
  // Half a window at a time: what was at its edge is then in its middle.
  byId("ex-earlier").addEventListener("click", () => moveWindow(-AT_ONCE / 2));
  byId("ex-later").addEventListener("click", () => moveWindow(AT_ONCE / 2));
  rove(byId("ex-queries"));
  rove(byId("ex-keys"));
}
