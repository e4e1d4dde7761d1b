"use strict";
// The plans of searches: the picture of each search with a point for every plan, the plans of the front, and what a plan says.
(function () {
  const searches = JSON.parse(document.getElementById("fronts").textContent);
  const pane = document.getElementById("pane-front");
  document.getElementById("tab-front").hidden = !searches.length;
  htp.front = { available: searches.length > 0 };
  if (!searches.length) return;

  // The picture was drawn from numbers and escaped text when the page was written. As XML, it holds no script that runs.
  function picture(text) {
    const svg = new DOMParser().parseFromString(text, "image/svg+xml").documentElement;
    return svg.nodeName === "svg" ? document.importNode(svg, true) : null;
  }

  function shown(search) {
    const drawing = search.svg ? picture(search.svg) : null;
    const plan = htp.make("div", { className: "plan", "aria-live": "polite" });
    const lines = new Map();
    const line = (trial, number) => {
      const cells = [trial.name, ...trial.values, trial.origin, trial.precisions];
      const row = htp.make("tr", { tabIndex: 0 }, ...cells.map((textContent) => htp.make("td", { textContent })));
      row.onclick = () => choose(number);
      row.onkeydown = (event) => event.key === "Enter" && choose(number);
      lines.set(number, row);
      return row;
    };
    function choose(number) {
      const trial = search.trials[number];
      for (const [of, row] of lines) row.setAttribute("aria-selected", of === number);
      for (const point of drawing?.querySelectorAll("[data-trial]") ?? []) point.classList.toggle("chosen", point.dataset.trial === String(number));
      plan.replaceChildren(
        htp.make("h3", { textContent: `${trial.name}${trial.file ? `, ${trial.file}` : ""}` }),
        htp.make("p", { textContent: search.objectives.map((name, k) => `${name} ${trial.values[k]}`).join(", ") }),
        htp.make("dl", {}, ...trial.plan.flatMap(([selector, precision]) => [
          htp.make("dt", { className: "path", textContent: selector }), htp.make("dd", { textContent: precision })])));
    }
    for (const point of drawing?.querySelectorAll("[data-trial]") ?? []) point.onclick = () => choose(Number(point.dataset.trial));
    const heads = ["plan", ...search.objectives, "from", "modules"];
    const table = htp.make("table", {},
      htp.make("thead", {}, htp.make("tr", {}, ...heads.map((textContent) => htp.make("th", { textContent })))),
      htp.make("tbody", {}, ...search.front.map((number) => line(search.trials[number], number))));
    if (search.front.length) choose(search.front[0]);
    return htp.make("div", { className: "front" },
      htp.make("p", { textContent: search.summary }), htp.make("div", { className: "sides" }, htp.make("div", {}, drawing, table), plan));
  }
  pane.append(...searches.map(shown));
})();
