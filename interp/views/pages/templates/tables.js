// Tables of numbers: a column's head sorts, a button downloads the table with its numbers in full.

const LONG_TABLE = 30; // rows, beyond which a table can be filtered

// A cell's value as a CSV file has it: a number in full where the cell shows a rounded one.
// A second, smaller line is not part of it.
const cellValue = (cell) => cell.dataset.value ?? cell.firstChild?.textContent ?? "";

// A shown number as one: 1,234 and −0.5 are written for readers; "–" is missing.
function cellNumber(cell) {
  const text = cellValue(cell).trim().replace(/,/g, "").replace(/−/g, "-");
  return cell.dataset.value === "" ? NaN : parseFloat(text);
}

// Compares two rows in a column; missing values are last in either direction.
function comparison(column, numbers, direction) {
  if (!numbers) {
    return (a, b) => direction * cellValue(a.cells[column]).localeCompare(
      cellValue(b.cells[column]), "en", {numeric: true});
  }
  return (a, b) => {
    const [one, other] = [a, b].map((row) => cellNumber(row.cells[column]));
    if (isNaN(one) || isNaN(other)) return isNaN(one) - isNaN(other);
    return direction * (one - other);
  };
}

function offerSort(table) {
  const body = table.tBodies[0];
  for (const [column, head] of [...table.tHead.rows[0].cells].entries()) {
    // A column of yes and no stands among the numbers.
    const numbers = [...body.rows].some((row) => !isNaN(cellNumber(row.cells[column])))
      && head.classList.contains("number");
    const button = el("button", {type: "button", class: "sort"}, head.textContent.trim());
    button.addEventListener("click", () => {
      const before = head.getAttribute("aria-sort");
      // The largest number is what one looks for first; words begin with A.
      const order = before ? (before === "ascending" ? "descending" : "ascending")
        : numbers ? "descending" : "ascending";
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", order);
      body.append(...[...body.rows].sort(comparison(column, numbers, order === "ascending" ? 1 : -1)));
      say(`Sorted by ${button.textContent}, ${order}.`);
    });
    head.replaceChildren(button);
  }
}

function csvOf(table) {
  const quote = (text) => (/[",\r\n]/.test(text) ? `"${text.replace(/"/g, '""')}"` : text);
  const heads = [...table.tHead.rows[0].cells].map((cell) => cell.textContent.trim().replace(/ /g, "_"));
  const rows = [...table.tBodies[0].rows].map((row) => [...row.cells].map(cellValue));
  return [heads, ...rows].map((row) => row.map(quote).join(",")).join("\n") + "\n";
}

function download(table, name) {
  const address = URL.createObjectURL(new Blob([csvOf(table)], {type: "text/csv"}));
  el("a", {href: address, download: `${name}.csv`}).click();
  // The browser has taken the address once the click is over.
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}

function offerFilter(table, tools) {
  const rows = [...table.tBodies[0].rows];
  const told = el("span", {role: "status"});
  const input = el("input", {type: "search", autocomplete: "off"});
  input.addEventListener("input", () => {
    const wanted = input.value.trim().toLowerCase();
    for (const row of rows) {
      row.hidden = ![...row.cells].some((cell) => cell.textContent.toLowerCase().includes(wanted));
    }
    told.textContent = wanted ? `${rows.filter((row) => !row.hidden).length} of ${rows.length} rows` : "";
  });
  tools.prepend(el("label", {}, "Filter ", input), told);
}

for (const table of document.querySelectorAll("table.data")) {
  offerSort(table);
  const caption = table.caption.textContent.trim();
  const tools = el("p", {class: "tools"});
  if (table.tBodies[0].rows.length > LONG_TABLE) offerFilter(table, tools);
  if ("whole" in table.dataset) {
    const name = caption.toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-|-$/g, "").slice(0, 60) || "table";
    tools.append(el("button", {
      type: "button", "aria-label": `Download CSV: ${caption}`, onclick: () => download(table, name),
    }, "Download CSV"));
  }
  if (tools.childElementCount) table.closest(".scroll").after(tools);
}
