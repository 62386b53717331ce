"use strict";
const charts = JSON.parse(document.getElementById("charts").textContent);
const table = document.getElementById("table");
const detail = document.getElementById("detail");
const font = getComputedStyle(document.body).fontFamily;
const sizes = { labelFontSize: 12, titleFontSize: 12 };
const config = { background: null, font, view: { stroke: null }, axis: sizes, legend: sizes };
const options = { mode: "vega-lite", renderer: "svg", actions: false, config };

// The numbers of other dots that lie on the one of this number, or within five pixels of it.
function covered(number) {
  const items = [...document.querySelectorAll(".dots_marks path")].map((dot) => dot.__data__);
  const own = items.find((item) => item.datum.number === number);
  const near = (item) => Math.hypot(item.x - own.x, item.y - own.y) < 5;
  return items.filter((item) => item !== own && near(item)).map((item) => item.datum.number);
}

function choose(number) {
  for (const row of table.querySelectorAll("tr.chosen")) row.classList.remove("chosen");
  const row = document.getElementById(`row-${number}`);
  row.classList.add("chosen");
  const cell = (key) => row.querySelector(`td[data-key="${key}"]`);
  const heading = (key) => table.querySelector(`th[data-key="${key}"]`).textContent;
  const link = document.createElement("a");
  link.href = `#row-${number}`;
  link.textContent = `${number}: ${cell("direction").textContent} of ${cell("problem").textContent}`;
  const kernel = document.createElement("div");
  kernel.append(...[...cell("kernel").childNodes].map((node) => node.cloneNode(true)));
  const numbers = document.createElement("div");
  const keys = ["gflop", "bytes", "share", "seconds", "roofline"];
  numbers.textContent = keys.map((key) => `${heading(key)} ${cell(key).textContent}`).join(", ");
  const here = covered(number).map((other) => {
    const item = document.createElement("a");
    item.href = `#row-${other}`;
    item.textContent = `${other}: ${document.getElementById(`row-${other}`).cells[1].textContent}`;
    item.addEventListener("click", () => choose(other));
    return item;
  });
  const others = document.createElement("div");
  if (here.length) others.append("At the same place: ", ...here.flatMap((item) => [item, " "]));
  const refused = row.querySelector("details ul");
  detail.replaceChildren(link, kernel, numbers, others, ...(refused ? [refused.cloneNode(true)] : []));
}

// The dots are one stop of the Tab key; arrow keys go from dot to dot, from left to right.
function walk(container) {
  const dots = [...container.querySelectorAll(".dots_marks path")];
  const across = (dot) => dot.getBoundingClientRect().left;
  dots.sort((a, b) => across(a) - across(b));
  dots.forEach((dot, place) => {
    dot.tabIndex = place === 0 ? 0 : -1;
    dot.addEventListener("focus", () => choose(dot.__data__.datum.number));
    dot.addEventListener("keydown", (event) => {
      const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
      const next = event.key === "Home" ? 0 : event.key === "End" ? dots.length - 1 : place + (steps[event.key] ?? 0);
      if (next === place || !dots[next]) return;
      event.preventDefault();
      dot.tabIndex = -1;
      dots[next].tabIndex = 0;
      dots[next].focus();
    });
  });
}

async function draw() {
  if (charts.roofline) {
    const { view } = await vegaEmbed("#roofline", charts.roofline, options);
    const chosen = (_event, item) => item?.datum?.number && choose(item.datum.number);
    view.addEventListener("click", chosen);
    view.addEventListener("pointerover", chosen);
    const container = document.getElementById("roofline");
    walk(container);
    view.addResizeListener(() => view.runAsync().then(() => walk(container)));
  }
  if (charts.memory) await vegaEmbed("#memory", charts.memory, options);
  document.documentElement.dataset.drawn = "true";
}

for (const button of table.querySelectorAll("th button")) {
  button.addEventListener("click", () => {
    const heading = button.parentElement;
    const key = heading.dataset.key;
    const descending = heading.getAttribute("aria-sort") === "ascending";
    for (const other of table.querySelectorAll("th")) other.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", descending ? "descending" : "ascending");
    const value = (row) => row.querySelector(`td[data-key="${key}"]`).dataset.sort;
    const numeric = !["direction", "problem", "kernel"].includes(key);
    const compare = (a, b) => (numeric ? value(a) - value(b) : value(a).localeCompare(value(b)));
    const rows = [...table.tBodies[0].rows];
    rows.sort((a, b) => (descending ? -1 : 1) * compare(a, b) || a.dataset.number - b.dataset.number);
    table.tBodies[0].append(...rows);
  });
}

addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((each) => (each.open = true)));
draw();
