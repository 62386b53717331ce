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
  mark(document.querySelector(`.box[data-row="${number}"]`));
  for (const row of table.querySelectorAll("tr.chosen")) row.classList.remove("chosen");
  const row = document.getElementById(`row-${number}`);
  row.classList.add("chosen");
  if (!detail) return;
  const cell = (key) => row.querySelector(`td[data-key="${key}"]`);
  const heading = (key) => table.querySelector(`th[data-key="${key}"]`).textContent;
  const link = document.createElement("a");
  link.href = `#row-${number}`;
  link.textContent = `${number}: ${cell("direction").textContent} of ${cell("problem").textContent}`;
  const kernel = document.createElement("div");
  kernel.append(...[...cell("kernel").childNodes].map((node) => node.cloneNode(true)));
  const numbers = document.createElement("div");
  const shown = [...row.querySelectorAll("td.number")].map((each) => each.dataset.key);
  numbers.textContent = shown.map((key) => `${heading(key)} ${cell(key).textContent}`).join(", ");
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

// Shows a box of the graph, with the lines to what it reads and to what reads it.
function mark(box) {
  if (!box) return;
  for (const each of document.querySelectorAll(".box.on, .line.on")) each.classList.remove("on");
  const number = box.dataset.number;
  const lines = [...document.querySelectorAll(".line")];
  const reads = lines.filter((line) => line.dataset.reader === number);
  const read = lines.filter((line) => line.dataset.source === number);
  for (const each of [box, ...reads, ...read]) each.classList.add("on");
  const label = (end) => document.querySelector(`.box[data-number="${end}"]`).getAttribute("aria-label");
  const title = document.createElement("b");
  title.textContent = box.getAttribute("aria-label");
  const calls = document.createElement("ul");
  calls.append(...box.dataset.calls.split("|").map((call) => {
    const item = document.createElement("li");
    item.textContent = call;
    return item;
  }));
  const says = (what, ends) => {
    const line = document.createElement("div");
    if (ends.length) line.textContent = `${what}: ${ends.map(label).join("; ")}`;
    return line;
  };
  document.getElementById("node").replaceChildren(
    title,
    says("reads from", reads.map((line) => line.dataset.source)),
    says("is read by", read.map((line) => line.dataset.reader)),
    calls,
  );
}

// The boxes are one stop of the Tab key; arrow keys go to the nearest box in their direction, Home and End along the step.
function walkGraph() {
  const boxes = [...document.querySelectorAll(".box")];
  const middle = (box) => {
    const { x, y, width, height } = box.getBoundingClientRect();
    return [x + width / 2, y + height / 2];
  };
  const towards = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] };
  function next(box, key) {
    if (key === "Home" || key === "End") return key === "Home" ? boxes[0] : boxes.at(-1);
    if (!towards[key]) return null;
    const [dx, dy] = towards[key];
    const [x, y] = middle(box);
    const far = (other) => {
      const [a, b] = middle(other);
      const along = (a - x) * dx + (b - y) * dy;
      const beside = Math.abs((a - x) * dy + (b - y) * dx);
      return along < 2 || (dy && beside > 2) ? Infinity : along + 3 * beside;
    };
    const best = boxes.reduce((a, b) => (far(b) < far(a) ? b : a));
    return far(best) === Infinity ? null : best;
  }
  const chosen = (box) => (box.dataset.row === "0" ? mark(box) : choose(Number(box.dataset.row)));
  for (const box of boxes) {
    box.addEventListener("focus", () => chosen(box));
    box.addEventListener("pointerover", () => chosen(box));
    box.addEventListener("click", () => box.focus());
    box.addEventListener("keydown", (event) => {
      const other = next(box, event.key);
      if (!other) return;
      event.preventDefault();
      for (const each of boxes) each.tabIndex = -1;
      other.tabIndex = 0;
      other.focus();
    });
  }
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

for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => {
    const heading = button.parentElement;
    const own = heading.closest("table");
    const key = heading.dataset.key;
    const descending = heading.getAttribute("aria-sort") === "ascending";
    for (const other of own.querySelectorAll("th")) other.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", descending ? "descending" : "ascending");
    const value = (row) => row.querySelector(`td[data-key="${key}"]`).dataset.sort;
    const numeric = !["direction", "problem", "kernel", "name", "phase"].includes(key);
    const compare = (a, b) => (numeric ? value(a) - value(b) : value(a).localeCompare(value(b)));
    const rows = [...own.tBodies[0].rows];
    rows.sort((a, b) => (descending ? -1 : 1) * compare(a, b) || a.dataset.number - b.dataset.number);
    own.tBodies[0].append(...rows);
  });
}

walkGraph();
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((each) => (each.open = true)));
draw();
