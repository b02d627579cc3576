"use strict";
const STEP = 200, ABOVE = 5;
const collator = new Intl.Collator("en", { numeric: true });
const compare = (x, y) => (typeof x === "number" && typeof y === "number" ? x - y : collator.compare(x, y));
const detail = (row) => {
  const next = row.nextElementSibling;
  return next && next.classList.contains("detail") ? next : null;
};
const value = (row, place) => {
  const cell = row.cells[place];
  return "order" in cell.dataset ? Number(cell.dataset.order) : cell.textContent.trim();
};
/* A page begins with the first rows; the others are text until the reader sorts, filters or asks for more.
   Only the rows that are shown are elements of the page, because a browser takes seconds to lay out thousands. */
const setUp = (table) => {
  const body = table.tBodies[0], heads = [...table.tHead.rows[0].cells], more = document.querySelector(`p[data-table="${table.id}"]`);
  const form = document.querySelector(`form[data-table="${table.id}"]`);
  let entries, kept, first = 0, shown = STEP;
  const load = () => {
    if (entries) return;
    const rest = document.createElement("template"), text = document.querySelector(`script[data-table="${table.id}"]`);
    rest.innerHTML = text ? text.textContent : "";
    const rows = [...body.rows, ...rest.content.children].filter((row) => !row.classList.contains("detail"));
    entries = kept = rows.map((row) => ({ row, below: detail(row), text: row.textContent.toLowerCase() }));
  };
  const render = () => {
    const end = Math.min(first + shown, kept.length);
    body.replaceChildren(...kept.slice(first, end).flatMap(({ row, below }) => (below ? [row, below] : [row])));
    if (!more) return;
    more.hidden = kept.length === end - first;
    more.firstElementChild.textContent = first ? `rows ${first + 1} to ${end} of ${kept.length}` : `${end} of ${kept.length} rows`;
  };
  const filter = () => {
    [kept, first] = [entries, 0];
    if (form) {
      const words = form.querySelector("input").value.toLowerCase().split(/\s+/).filter(Boolean);
      const chosen = [...form.querySelectorAll("select")].filter((select) => select.value);
      kept = entries.filter(({ row, text }) => words.every((word) => text.includes(word)) &&
        chosen.every((select) => row.cells[select.dataset.column].textContent.trim() === select.value));
      form.querySelector("output").textContent = `${kept.length} of ${entries.length} rows`;
    }
    render();
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
      load();
      const keys = new Map(entries.map((entry) => [entry, value(entry.row, place)]));
      entries.sort((x, y) => sign * compare(keys.get(x), keys.get(y)));
      filter();
    });
  });
  if (form) {
    form.addEventListener("input", () => { load(); filter(); });
    form.addEventListener("submit", (event) => event.preventDefault());
  }
  if (!more) return;
  const show = (from, count) => {
    load();
    [first, shown] = [from, count];
    render();
  };
  const [, some, all] = more.children;
  some.addEventListener("click", () => show(first, shown + STEP));
  all.addEventListener("click", () => show(0, Infinity));
  addEventListener("beforeprint", () => show(0, Infinity));
  const follow = () => {
    const id = location.hash.slice(1);
    if (!id || document.getElementById(id)) return;
    load();
    const place = () => kept.findIndex(({ row }) => row.id === id);
    if (place() < 0) {
      if (!entries.some(({ row }) => row.id === id)) return;
      form.reset();
      filter();
    }
    show(Math.max(0, place() - ABOVE), STEP);
    location.replace(location.hash); /* the row is in the page now */
  };
  addEventListener("hashchange", follow);
  follow();
};
document.querySelectorAll("table.sortable").forEach(setUp);
