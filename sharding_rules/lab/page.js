"use strict";

// What lies under the pointer, in words.
const tip = document.getElementById("tip");
document.addEventListener("pointermove", (event) => {
  const under = event.target.closest ? event.target.closest("[data-tip]") : null;
  tip.hidden = !under;
  if (!under) return;
  tip.textContent = under.dataset.tip;
  const room = 14;
  const left = Math.min(event.clientX + room, window.innerWidth - tip.offsetWidth - room);
  const below = event.clientY + room + tip.offsetHeight < window.innerHeight;
  tip.style.left = `${Math.max(left, room)}px`;
  tip.style.top = `${below ? event.clientY + room : event.clientY - tip.offsetHeight - room}px`;
});
document.addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });

// A click on the head of a column sorts by it, another one the other way.
function value(cell) {
  return "value" in cell.dataset ? Number(cell.dataset.value) : cell.textContent;
}
function sort(table, column, head) {
  const numeric = head.classList.contains("n");
  const before = head.getAttribute("aria-sort");
  const up = before ? before === "descending" : !numeric;
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", up ? "ascending" : "descending");
  const body = table.tBodies[0];
  const rows = [...body.rows].sort((a, b) => {
    const [x, y] = [value(a.cells[column]), value(b.cells[column])];
    return (numeric ? x - y : x.localeCompare(y)) * (up ? 1 : -1);
  });
  body.append(...rows);
}
for (const table of document.querySelectorAll("table.sortable")) {
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    head.tabIndex = 0;
    head.addEventListener("click", () => sort(table, column, head));
    head.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === " ") { event.preventDefault(); sort(table, column, head); }
    });
  });
}

// A chip shows the collectives over one set of mesh axes, and adds up those only.
function filter(chips, chosen) {
  const axis = chosen.dataset.axis;
  for (const chip of chips.children) chip.setAttribute("aria-pressed", String(chip === chosen));
  const table = document.querySelector("#network table.collectives");
  const sums = new Map();
  for (const row of table.tBodies[0].rows) {
    row.hidden = axis !== "" && row.dataset.axis !== axis;
    if (row.hidden) continue;
    [...row.cells].forEach((cell, i) => sums.set(i, (sums.get(i) || 0) + Number(cell.dataset.value || 0)));
  }
  [...table.tFoot.rows[0].cells].forEach((cell, i) => {
    if (!("value" in cell.dataset)) return;
    const digits = (cell.textContent.split(".")[1] || "").length;
    cell.textContent = sums.get(i).toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  });
}
for (const chips of document.querySelectorAll(".chips")) {
  chips.hidden = false;
  chips.addEventListener("click", (event) => { if (event.target.dataset.axis !== undefined) filter(chips, event.target); });
}

document.documentElement.dataset.ready = "yes";
