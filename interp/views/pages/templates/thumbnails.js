// Small pictures of all embedded patterns, drawn when they come into view and not kept unpacked.

const THUMB = 64; // pixels

let watcher = null;
let drawing = Promise.resolve(); // one picture after the other, so that the page stays quick

// The weights on at most 64 x 64 cells: each is the largest it covers, so that thin stripes stay; -1 is
// a cell of which no query sees a key.
function pooled(weights, size, seen) {
  const side = Math.min(THUMB, size);
  const cells = new Float64Array(side * side).fill(-1);
  const place = (position) => Math.floor((position * side) / size);
  for (let query = 0; query < size; query++) {
    const row = place(query) * side;
    const [first, end] = seen(query);
    for (let key = 0; key < size; key++) {
      const weight = weights[query * size + key];
      if (weight === 0 && (key < first || key >= end)) continue;
      const cell = row + place(key);
      cells[cell] = Math.max(cells[cell], weight);
    }
  }
  return {cells, side};
}

// The scale's colour at a part of it, as [red, green, blue].
function colourAt(scale, part) {
  const channels = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
  const upper = Math.max(1, scale.findIndex(([stop]) => stop >= part));
  const [[low, first], [high, second]] = [scale[upper - 1], scale[upper]];
  const [one, two] = [channels(first), channels(second)];
  return one.map((channel, number) => channel + ((two[number] - channel) * (part - low)) / (high - low));
}

function paint(canvas, {cells, side}) {
  const largest = Math.max(0, ...cells) || 1;
  const colours = Array.from({length: 256}, (_, code) => colourAt(scaleNow(false), code / 255));
  canvas.width = canvas.height = side;
  const pen = canvas.getContext("2d");
  const picture = pen.createImageData(side, side);
  for (let cell = 0; cell < cells.length; cell++) {
    // What cannot be seen stays transparent.
    if (cells[cell] >= 0) picture.data.set([...colours[Math.round((cells[cell] / largest) * 255)], 255], 4 * cell);
  }
  pen.putImageData(picture, 0, 0);
}

let drawnFor = ""; // the subject and the text whose pictures are there

// In other colours, all are to be drawn anew.
function forgetThumbnails() {
  drawnFor = "";
}

function showThumbnails() {
  const number = textNumber();
  if (drawnFor !== `${now.subject}-${number}`) layThumbnails(number);
  drawnFor = `${now.subject}-${number}`;
  const spread = spreadScore();
  for (const button of byId("ex-thumbs").children) {
    const index = Number(button.dataset.index);
    button.setAttribute("aria-pressed", String(index === now.head));
    const far = spread && (valuesOf(spread)[index] ?? null);
    button.querySelector("small").textContent = !spread ? "" : far === null ? "–" : written(far, 2);
  }
}

const spreadScore = () => theSubject().scores.find(({name}) => /^from uniform\b/i.test(plain(name)));

function layThumbnails(number) {
  const {n_heads, texts} = theSubject();
  const text = texts[number], subject = now.subject;
  const box = byId("ex-thumbs");
  byId("ex-thumbs-box").hidden = !text?.heads.length || !canUnpack;
  watcher?.disconnect();
  box.replaceChildren();
  if (byId("ex-thumbs-box").hidden) return;
  const {length} = text.heads;
  byId("ex-thumbs-about").textContent = `${length} ${length === 1 ? "pattern is" : "patterns are"} embedded, `
    + `the furthest from uniform first${spreadScore() ? "; the number is how far, 0 to 1" : ""}. `
    + "Each is coloured from 0 to its own largest weight.";
  const draw = (button) => async () => {
    if (!button.isConnected) return;
    const weights = await unpack(packed(subject, number, button.dataset.head), text.bits);
    paint(button.querySelector("canvas"), pooled(weights, text.tokens.length, reach(text, button.dataset.head)));
    button.dataset.drawn = "";
  };
  watcher = new IntersectionObserver((entries, observer) => {
    for (const {isIntersecting, target} of entries) {
      if (!isIntersecting) continue;
      observer.unobserve(target);
      drawing = drawing.then(draw(target));
    }
  }, {rootMargin: "200px"});
  for (const [place, label] of text.heads.entries()) {
    const [layer, head] = label.split(".").map(Number);
    const index = layer * n_heads + head;
    const button = headButton(index, " ", el("small"));
    button.prepend(el("canvas", {width: THUMB, height: THUMB, "aria-hidden": "true"}));
    Object.assign(button.dataset, {head: label, index});
    button.tabIndex = place ? -1 : 0;
    box.append(button);
    watcher.observe(button);
  }
}

rove(byId("ex-thumbs"));
startExplorer();
