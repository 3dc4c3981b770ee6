"use strict";
// What every page does: draws its figures in the colours of the reader, and lets a click on a map
// of heads choose that head in the page's explorer, where there is one.

// Chromium drops the change of a query whose answer was read before it told its listeners: the query
// that is listened to is never read.
const scheme = matchMedia("(prefers-color-scheme: dark)");
const isDark = () => !onPaper && matchMedia("(prefers-color-scheme: dark)").matches;
let onPaper = false; // while the page is printed, which is always light
addEventListener("beforeprint", () => (onPaper = true));
addEventListener("afterprint", () => (onPaper = false));
// On a touch screen a drag scrolls the page; elsewhere it zooms.
const touch = matchMedia("(pointer: coarse)").matches;
const motion = matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth";
// plotly's own bar of buttons covers the colour bar of a small map and cannot be reached by Tab: each
// figure has buttons of its own instead. One of plotly's uploads the figure: off, and without an address.
const settings = {
  responsive: true, displaylogo: false, displayModeBar: false, showSendToCloud: false, plotlyServerURL: "",
};

const byId = (id) => document.getElementById(id);

// An element with attributes ("on..." are listeners; null and false are left out) and children, of
// which texts stay text.
function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

// plotly reads tags, templates and formulas in texts; entities pass all three.
const ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "$": "&#36;", "%": "&#37;", "\n": " "};
const literal = (text) => String(text).replace(/[&<>$%\n]/g, (character) => ENTITIES[character]);

// Says it to a screen reader.
function say(words) {
  byId("said").textContent = words;
}

// Sets "font.color" and the like in a layout before it is drawn, so that it is drawn once.
function set(layout, paths) {
  for (const [path, value] of Object.entries(paths)) {
    const names = path.split(".");
    const last = names.pop();
    let place = layout;
    for (const name of names) place = place[name] ??= {};
    place[last] = value;
  }
  return layout;
}

// Figures wait in a queue and are drawn one at a time: the page can be read and used meanwhile.
const figures = [];

function draw(...figure) {
  figures.push(figure);
}

async function drawFigures() {
  for (const figure of figures) {
    await drawNow(...figure);
    await new Promise((done) => setTimeout(done));
  }
  document.documentElement.dataset.figures = "drawn";
}

function drawNow(name, data, layout, whenLight, whenDark) {
  const plot = byId(name);
  if (touch) layout.dragmode = false;
  const recolour = () => Plotly.relayout(plot, isDark() ? whenDark : whenLight);
  scheme.addEventListener("change", recolour);
  for (const moment of ["beforeprint", "afterprint"]) addEventListener(moment, recolour);
  data.forEach(writeOut);
  return Plotly.newPlot(plot, data, set(layout, isDark() ? whenDark : whenLight), settings).then(() => {
    offerTools(plot);
    if (data.some((trace) => trace.type === "heatmap")) listen(plot);
  });
}

// A large map has the words of its cells once for each row and each column.
function writeOut(trace) {
  const {rows, columns} = trace.customdata ?? {};
  if (rows) trace.customdata = rows.map((row) => columns.map((column) => [row, column]));
}

function offerTools(plot) {
  const title = plot.closest("figure").querySelector("h3").textContent;
  const unzoom = el("button", {type: "button", hidden: ""}, "Reset zoom");
  unzoom.addEventListener("click", () => {
    const axes = Object.keys(plot.layout).filter((key) => /^[xy]axis\d*$/.test(key));
    Plotly.relayout(plot, plot.unzoomed ?? Object.fromEntries(axes.map((axis) => [`${axis}.autorange`, true])));
    save.focus({preventScroll: true});
    unzoom.hidden = true;
  });
  plot.on("plotly_relayout", (change) => {
    const keys = Object.keys(change);
    if (keys.some((key) => /axis\d*\.range/.test(key))) unzoom.hidden = false;
    if (keys.some((key) => /axis\d*\.autorange/.test(key))) unzoom.hidden = true;
  });
  plot.unzoomed = rangesOf(plot);
  const save = el("button", {type: "button", onclick: () => savePicture(plot, title)}, "Save as PNG");
  save.setAttribute("aria-label", `Save as PNG: ${title}`);
  plot.after(el("p", {class: "tools"}, unzoom, save));
}

// The ranges a figure was drawn with: some are its own, and "autorange" would undo those.
function rangesOf(plot) {
  const axes = Object.keys(plot._fullLayout).filter((key) => /^[xy]axis\d*$/.test(key));
  return Object.fromEntries(axes.map((axis) => [`${axis}.range`, [...plot._fullLayout[axis].range]]));
}

// The picture has the title, which a page sets as HTML, and the page's own background.
function savePicture(plot, title) {
  const {width, height} = plot.getBoundingClientRect();
  const layout = {
    ...plot.layout, width, height: height + 36, paper_bgcolor: getComputedStyle(document.body).backgroundColor,
    margin: {...plot.layout.margin, t: (plot.layout.margin?.t ?? 12) + 36},
    title: {text: literal(title), x: 0, xref: "paper", y: 1, yref: "container", yanchor: "top", pad: {t: 12}},
  };
  const filename = title.toLowerCase().replace(/[^a-z0-9]+/g, "-").slice(0, 60) || "figure";
  Plotly.downloadImage({data: plot.data, layout}, {format: "png", scale: 2, width, height: height + 36, filename});
}

// Tells the explorer which head a cell of a map stands for; other figures have no subject.
function activate(plot, trace, row, column) {
  const cell = trace.customdata?.[row]?.[column];
  if (trace.meta?.subject === undefined || !cell) return;
  const {subject, step} = trace.meta;
  const detail = {subject, step, layer: Number(cell[0]), head: Number(cell[1]), from: plot};
  document.dispatchEvent(new CustomEvent("choose-head", {detail}));
}
