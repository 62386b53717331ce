// Tables: a click on a heading sorts, and long ones have a field that shows only the rows with all its words.
// Code blocks: Copy takes the commands of a terminal session, without prompts and output. Labels for screen readers.
"use strict";

function sortable(table) {
  const heads = [...table.tHead.rows[0].cells];
  const text = (row, place) => row.cells[place]?.textContent.trim() ?? "";
  // 1,234.5 ms, 12 % and 3.4x sort as numbers; a column is one of numbers if most of its cells begin with one
  const number = (cell) => parseFloat(cell.replaceAll(",", ""));
  heads.forEach((head, place) => {
    if (!head.textContent.trim()) return;
    const button = document.createElement("button");
    button.type = "button";
    button.className = "sorts";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      for (const other of heads) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const rows = [...table.tBodies[0].rows];
      const cells = rows.map((row) => text(row, place)).filter(Boolean);
      const numeric = cells.filter((cell) => !Number.isNaN(number(cell))).length > cells.length / 2;
      const value = (row) => {
        const cell = text(row, place);
        if (!numeric) return cell;
        return Number.isNaN(number(cell)) ? -Infinity : number(cell);
      };
      const compare = (a, b) => (numeric ? value(a) - value(b) : value(a).localeCompare(value(b)));
      rows.sort((a, b) => (down ? compare(b, a) : compare(a, b)) || 0);
      table.tBodies[0].append(...rows);
    });
  });
}

function filtered(table) {
  table.dataset.filtered = "";
  const rows = [...table.tBodies[0].rows];
  const label = document.createElement("label");
  const field = document.createElement("input");
  const count = document.createElement("span");
  field.type = "search";
  field.placeholder = "words";
  count.setAttribute("aria-live", "polite");
  label.className = "filters";
  label.append("Rows with ", field, " ", count);
  const show = () => {
    const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
      shown += row.hidden ? 0 : 1;
    }
    count.textContent = `${shown} of ${rows.length}`;
  };
  field.addEventListener("input", show);
  show();
  (table.closest(".md-typeset__scrollwrap") ?? table).before(label);
}

// Material adds the buttons of a code block when it is first in view.
function labelled(buttons, number) {
  buttons.setAttribute("aria-label", `Code block ${number}`);
  const code = buttons.parentElement.querySelector("code");
  const copy = buttons.querySelector("[data-clipboard-target]");
  if (!copy || !code.querySelector(".gp")) return;
  const commands = code.cloneNode(true);
  for (const other of commands.querySelectorAll(".gp, .go")) other.remove();
  copy.dataset.clipboardText = commands.textContent.trim().replace(/\n+/g, "\n");
}

document.addEventListener("DOMContentLoaded", () => {
  document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
  for (const table of document.querySelectorAll(".md-content table:not([class])")) {
    if (!table.tHead || !table.tBodies[0]) continue;
    if (!table.tHead.textContent.trim()) {
      table.tHead.remove();
      continue;
    }
    for (const head of table.tHead.querySelectorAll("th:empty")) head.replaceWith(document.createElement("td"));
    if (table.tBodies[0].rows.length < 6) continue;
    sortable(table);
    if (table.tBodies[0].rows.length > 15) filtered(table);
  }
  let numbered = 0;
  const label = () => {
    for (const buttons of document.querySelectorAll(".md-code__nav:not([aria-label])")) labelled(buttons, ++numbered);
  };
  new MutationObserver(label).observe(document.querySelector(".md-content"), { childList: true, subtree: true });
  label();
});
