"use strict";
(() => {
  document.documentElement.classList.add("scripted");

  // pictures: a slider chooses the step
  for (const film of document.querySelectorAll(".film")) {
    const slider = film.querySelector("input[type=range]");
    const frames = [...film.querySelectorAll(".frame")];
    const output = film.querySelector("output");
    if (!slider) continue;
    const show = () => {
      frames.forEach((frame, place) => { frame.hidden = place !== Number(slider.value); });
      const label = frames[Number(slider.value)].dataset.label;
      output.textContent = label;
      slider.setAttribute("aria-valuetext", label);
    };
    slider.addEventListener("input", show);
    show();
  }

  // copy buttons
  const copied = async (text) => {
    if (navigator.clipboard && window.isSecureContext) {
      try { await navigator.clipboard.writeText(text); return true; } catch { /* not allowed here: the older way */ }
    }
    const area = document.createElement("textarea");
    area.value = text;
    area.setAttribute("readonly", "");
    area.className = "visually-hidden";
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  };
  for (const button of document.querySelectorAll("button.copy")) {
    button.addEventListener("click", async () => {
      const done = await copied(document.getElementById(button.dataset.of).textContent);
      button.textContent = done ? "Copied" : "Press Ctrl+C";
      setTimeout(() => { button.textContent = "Copy"; }, 2000);
    });
  }

  // sortable tables: a column by its numbers where it has them, else by its text
  for (const table of document.querySelectorAll("table.sortable")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      const button = head.querySelector("button");
      if (!button) return;
      button.addEventListener("click", () => {
        const direction = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", direction === 1 ? "ascending" : "descending");
        const key = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent.trim();
        const compared = (a, b) => {
          const [x, y] = [key(a), key(b)];
          if (x === "" || y === "") return (x === "") - (y === "");
          const [m, n] = [Number(x), Number(y)];
          return direction * (Number.isNaN(m) || Number.isNaN(n) ? x.localeCompare(y) : m - n);
        };
        table.tBodies[0].append(...[...table.tBodies[0].rows].sort(compared));
      });
    });
  }

  // a link to a card opens what it is folded into
  const opened = () => {
    const target = location.hash.length > 1 ? document.getElementById(decodeURIComponent(location.hash.slice(1))) : null;
    const folded = target ? target.closest("details") : null;
    if (folded) { folded.open = true; target.scrollIntoView(); }
  };
  window.addEventListener("hashchange", opened);
  opened();
})();
