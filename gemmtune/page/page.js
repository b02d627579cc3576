"use strict";
const collator = new Intl.Collator("en", { numeric: true });
const compare = (x, y) => (typeof x === "number" && typeof y === "number" ? x - y : collator.compare(x, y));
const detail = (row) => {
  const next = row.nextElementSibling;
  return next && next.classList.contains("detail") ? next : null;
};
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0], heads = [...table.tHead.rows[0].cells];
  const rows = () => [...body.rows].filter((row) => !row.classList.contains("detail"));
  const value = (row, place) => {
    const cell = row.cells[place];
    return "order" in cell.dataset ? Number(cell.dataset.order) : cell.textContent.trim();
  };
  body.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    const opened = detail(button.closest("tr"));
    opened.hidden = !opened.hidden;
    button.setAttribute("aria-expanded", String(!opened.hidden));
  });
  heads.forEach((head, place) => {
    head.firstElementChild.addEventListener("click", () => {
      const sign = head.getAttribute("aria-sort") === "descending" ? 1 : -1;
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", sign < 0 ? "descending" : "ascending");
      const sorted = rows().map((row) => [value(row, place), row, detail(row)]).sort((x, y) => sign * compare(x[0], y[0]));
      body.append(...sorted.flatMap(([, row, below]) => (below ? [row, below] : [row])));
    });
  });
  const form = document.querySelector(`form[data-table="${table.id}"]`);
  if (!form) continue;
  const find = form.querySelector("input"), selects = [...form.querySelectorAll("select")], count = form.querySelector("output");
  form.addEventListener("input", () => {
    const words = find.value.toLowerCase().split(/\s+/).filter(Boolean), all = rows();
    let shown = 0;
    for (const row of all) {
      const text = row.textContent.toLowerCase();
      const keep = words.every((word) => text.includes(word)) &&
        selects.every((select) => !select.value || row.cells[select.dataset.column].textContent.trim() === select.value);
      row.hidden = !keep;
      const below = detail(row);
      if (!keep && below) below.hidden = true;
      shown += keep;
    }
    count.textContent = `${shown} of ${all.length} rows`;
  });
  form.addEventListener("submit", (event) => event.preventDefault());
}
