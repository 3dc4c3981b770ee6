// Maps by pointer and by keyboard: arrow keys move a cursor over the cells, its hover words are shown
// and said, Enter does what a click does. Page Up and Page Down go from map to map in one figure.

const ARROWS = {ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1]};
// plotly shows a hover label at most every 50 ms, and on a busy machine later still.
const HOVER_WAIT = 60, HOVER_TRIES = 20;

const axisOf = (plot, id) => plot._fullLayout[id.replace(/^([xy])/, "$1axis")];

// Lays a frame over a cell; `kind` is its class, and there is one of each kind in a figure.
function frame(plot, kind, trace, row, column) {
  const box = plot.querySelector(`:scope > .${kind}`) ?? plot.appendChild(el("div", {class: kind}));
  const x = axisOf(plot, trace.xaxis ?? "x"), y = axisOf(plot, trace.yaxis ?? "y");
  const along = (axis, value) => {
    const ends = [axis.d2p(value - 0.5), axis.d2p(value + 0.5)];
    return {from: Math.min(...ends), size: Math.abs(ends[1] - ends[0]), inside: Math.min(...ends) > -1
      && Math.max(...ends) < axis._length + 1};
  };
  const across = along(x, trace.x?.[column] ?? column), down = along(y, trace.y?.[row] ?? row);
  // Zooming may leave the cell outside.
  box.hidden = !(across.inside && down.inside);
  // A cell of a long text is a pixel or two: its frame stays large enough to be seen.
  const width = Math.max(across.size, 6), height = Math.max(down.size, 6);
  box.style.left = `${x._offset + across.from + (across.size - width) / 2}px`;
  box.style.top = `${y._offset + down.from + (down.size - height) / 2}px`;
  box.style.width = `${width}px`;
  box.style.height = `${height}px`;
}

const unframe = (plot, kind) => plot.querySelector(`:scope > .${kind}`)?.remove();

function hoverWords(plot) {
  const lines = [...plot.querySelectorAll(".hoverlayer .hovertext tspan.line")];
  const whole = lines.length ? lines : [...plot.querySelectorAll(".hoverlayer .hovertext text")];
  return whole.map((line) => line.textContent).filter(Boolean).join(", ");
}

// Lets the cells of a drawn figure be clicked, and walked over with the keyboard.
function listen(plot) {
  let cursor = null;
  const maps = () => plot.data.flatMap((trace, number) => (trace.type === "heatmap" ? [number] : []));
  const show = () => {
    if (cursor) frame(plot, "cursor", plot.data[cursor.trace], cursor.row, cursor.column);
  };
  const move = (trace, row, column) => {
    const {z} = plot.data[trace];
    const within = (value, size) => Math.max(0, Math.min(size - 1, value));
    cursor = {trace, row: within(row, z.length), column: within(column, z[0].length)};
    show();
    const {x, y, xaxis = "x", yaxis = "y"} = plot.data[trace];
    Plotly.Fx.unhover(plot, {});
    // plotly's form with a point's number draws no label on a heatmap.
    const at = {xval: x?.[cursor.column] ?? cursor.column, yval: y?.[cursor.row] ?? cursor.row};
    Plotly.Fx.hover(plot, at, xaxis + yaxis);
    sayHover(cursor);
  };
  const sayHover = (at, tries = HOVER_TRIES) => {
    const words = hoverWords(plot);
    const blank = (plot.data[at.trace].z[at.row][at.column] ?? null) === null;
    if (blank) say((plot.blankWords ?? blankWords(plot, at.trace))(at.row, at.column));
    else if (words) say(words);
    else if (tries) setTimeout(() => cursor === at && sayHover(at, tries - 1), HOVER_WAIT);
  };
  plot.on("plotly_click", ({points: [point]}) => {
    if (Array.isArray(point.pointNumber)) activate(plot, point.data, ...point.pointNumber);
  });
  plot.on("plotly_afterplot", show);
  plot.addEventListener("focus", () => {
    // A click focuses too, and has its own hover words.
    if (plot.matches(":focus-visible") && maps().length) {
      move(...(cursor ? [cursor.trace, cursor.row, cursor.column] : [maps()[0], ...firstCell(plot)]));
    }
  });
  plot.addEventListener("blur", () => {
    cursor = null;
    unframe(plot, "cursor");
    Plotly.Fx.unhover(plot, {});
  });
  plot.addEventListener("keydown", (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey || !maps().length) return;
    const at = cursor ?? {trace: maps()[0], row: 0, column: 0};
    const trace = plot.data[at.trace];
    const order = maps();
    if (event.key in ARROWS) {
      const [down, right] = ARROWS[event.key];
      const range = axisOf(plot, trace.yaxis ?? "y").range;
      move(at.trace, at.row + (range[0] > range[1] ? down : -down), at.column + right);
    } else if (event.key === "Home" || event.key === "End") {
      move(at.trace, at.row, event.key === "Home" ? 0 : Infinity);
    } else if ((event.key === "PageUp" || event.key === "PageDown") && order.length > 1) {
      const next = order.indexOf(at.trace) + (event.key === "PageUp" ? -1 : 1);
      move(order[Math.max(0, Math.min(order.length - 1, next))], at.row, at.column);
    } else if (event.key === "Enter" && cursor) {
      activate(plot, trace, at.row, at.column);
    } else {
      return;
    }
    event.preventDefault();
  });
}

// Where the cursor starts: the chosen cell of the explorer's map, else the first.
const firstCell = (plot) => plot.chosenCell ?? [0, 0];

const blankWords = (plot, trace) => (row, column) => {
  const {customdata, meta} = plot.data[trace];
  const cell = meta?.subject === undefined ? null : customdata?.[row]?.[column];
  return cell ? `layer ${cell[0]}, head ${cell[1]}, no value` : `row ${row}, column ${column}, no value`;
};
