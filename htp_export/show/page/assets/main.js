"use strict";
// What stands around the tree: facts, trust in the tags, tabs, theme, keys.
(function () {
  const { data } = htp;
  const byId = (id) => document.getElementById(id);
  const count = (number, word) => `${number.toLocaleString("en")} ${word}${number === 1 ? "" : "s"}`;

  byId("name").textContent = data.name;
  const facts = [htp.simple(htp.root.class), count(htp.nodes.length, "node"), count(data.count, "module"),
    `${htp.compact(htp.root.parameters)} parameters`, htp.compact(htp.root.bytes, "B"), ...data.facts];
  byId("facts").textContent = facts.filter(Boolean).join("  ·  ");
  byId("facts").title = facts.join("\n");

  byId("trust").append(
    tagsLine(htp.make, "", data),
    ...data.advice.map((text) => htp.make("div", { className: "advice", textContent: text })),
    ...data.failures.map((text) => htp.make("div", { className: "advice failure", textContent: text })));
  byId("foot").append(htp.make("span", { textContent: "↑ ↓ ← → move · Enter opens and closes · * opens all below · x shows each of several that are drawn as one · / searches" }));

  const TABS = ["modules", "map", "graph"];
  htp.tab = function (name) {
    for (const each of TABS) {
      byId(`tab-${each}`).setAttribute("aria-selected", each === name);
      byId(`pane-${each}`).hidden = each !== name;
    }
    byId("detail").hidden = name === "graph"; // the graph has a panel of its own
    if (name === "graph") htp.graph.open();
    if (name === "map") htp.map.draw();
  };
  TABS.forEach((name) => (byId(`tab-${name}`).onclick = () => htp.tab(name)));

  const theme = (name) => {
    document.documentElement.dataset.theme = name;
    htp.map.draw();
  };
  theme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  byId("theme").onclick = () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");

  document.addEventListener("keydown", (event) => {
    const typing = event.target.matches("input, select, textarea");
    if (event.key === "/" && !typing) {
      event.preventDefault();
      htp.tab("modules");
      byId("search").focus();
    }
    if (event.key === "Escape" && event.target === byId("search")) {
      byId("search").value = "";
      byId("search").dispatchEvent(new Event("input"));
      byId("table").focus();
    }
  });
  document.addEventListener("click", (event) => !event.target.closest("#columns") && (byId("columns").open = false));

  const wanted = decodeURIComponent(location.hash.slice(1));
  htp.select(htp.byPath.get(wanted) ?? htp.root);
  byId("table").focus();
  document.documentElement.dataset.ready = "yes";
})();
