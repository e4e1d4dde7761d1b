"use strict";
// What stands around the tree: facts, trust in the tags, tabs, theme, keys.
(function () {
  const { data } = htp;
  const ENDS = 6; // inputs and outputs that are named at the top; of more, the others are folded
  const byId = (id) => document.getElementById(id);
  const count = (number, word) => `${number.toLocaleString("en")} ${word}${number === 1 ? "" : "s"}`;

  byId("name").textContent = data.name;
  // Several graphs: another one is shown by loading the page again, since every part of it is made for one graph.
  const choice = document.querySelector("#choice select");
  choice.append(...htp.graphs.map(({ title }, k) => htp.make("option", { value: k, textContent: title })));
  choice.value = htp.shown;
  byId("choice").hidden = htp.graphs.length < 2;
  choice.onchange = () => {
    const state = new URLSearchParams(location.hash.slice(1));
    for (const key of ["node", "modules", "search"]) state.delete(key);
    state.set("part", choice.value);
    location.hash = state;
  };
  byId("note").textContent = htp.graphs[htp.shown].note;
  byId("note").hidden = !byId("note").textContent;
  const containers = data.count - htp.modules.length;
  const modules = count(data.count, "module");
  const facts = [htp.simple(htp.root.class), count(htp.nodes.length, "node"), modules,
    `${htp.compact(htp.root.parameters)} parameters`, htp.compact(htp.root.bytes, "B"), htp.time && `${htp.withUnit(htp.time.of(htp.root), htp.time)} a run`, data.tags.headline].filter(Boolean);
  byId("facts").append(...facts.flatMap((fact, k) => [k ? " · " : "", htp.make("span", { textContent: fact })]));
  if (containers) byId("facts").children[facts.indexOf(modules)].title = `with ${count(containers, "container")}, which have no row: their names stand before those of the modules in them`;
  byId("origin").textContent = data.facts.join(" · ");
  const end = (word) => ([name, type]) => htp.make("span", {}, `${word} `, htp.make("span", { className: "path", textContent: name }), ` ${type}`);
  const ends = [...data.inputs.map(end("in")), ...data.outputs.map(end("out"))];
  const more = ends.splice(ends.length > ENDS ? ENDS - 1 : ENDS);
  byId("ends").append(...ends);
  if (more.length) byId("ends").append(htp.make("details", {}, htp.make("summary", { textContent: `and ${more.length} more inputs and outputs` }), ...more));

  byId("trust").append(tagsLine(htp.make, "", data.tags));
  byId("advice").append(
    ...data.advice.map((text) => htp.make("div", { className: "advice", textContent: text })),
    ...data.failures.map((text) => htp.make("div", { className: "advice failure", textContent: text })));
  const KEYS = {
    modules: "A click on a head sorts · ↑ ↓ ← → move · Enter opens and closes · * opens all below · x shows each of several that are drawn as one · / searches",
    map: "← → beside · ↓ into a module · ↑ out of it · Enter or a double click makes it the whole map · Escape comes back · / searches",
    graph: "↑ ↓ through modules and nodes · → opens a module · ← closes it · x shows each of several that are drawn as one · m merges trivial nodes or shows them · + − 0 zoom · drag moves · Tab to the table and the overview · / searches",
    front: "A click on a point, or Enter on a line, shows its plan",
    explorer: "Tab or click into the graph, then ← → beside · ↓ into a module · ↑ out of it · space fits the graph into the window",
  };

  const TABS = ["modules", "map", "graph", ...(htp.front.available ? ["front"] : []), "explorer"];
  const phone = matchMedia("(max-width: 700px)");
  let tab = "modules";
  htp.tab = function (name) {
    tab = name;
    byId("foot").textContent = KEYS[name];
    for (const each of TABS) {
      byId(`tab-${each}`).setAttribute("aria-selected", each === name);
      byId(`pane-${each}`).hidden = each !== name;
    }
    byId("side").hidden = name === "front" || (name === "explorer" && !phone.matches); // these have panels of their own, Model Explorer where there is room for it
    if (name === "explorer") htp.explorer.open();
    if (name === "modules") htp.table.open();
    if (name === "map") htp.map.draw();
    if (name === "graph") htp.graph.open();
    remember();
  };
  phone.addEventListener("change", () => htp.tab(tab));
  // What is selected is described beside the panes; on a phone, in a line that opens.
  function fold(folded) {
    byId("side").classList.toggle("folded", folded);
    byId("side-fold").setAttribute("aria-expanded", !folded);
  }
  byId("side-fold").onclick = () => fold(!byId("side").classList.contains("folded"));
  fold(phone.matches);
  htp.listeners.push((item) => (byId("side-fold").firstChild.textContent = item?.kind === "fold" ? item.label : item ? htp.title(item) : ""));
  TABS.forEach((name) => (byId(`tab-${name}`).onclick = () => htp.tab(name)));

  const theme = (name) => {
    document.documentElement.dataset.theme = name;
    htp.map.draw();
    htp.graph.restyle();
    htp.explorer.restyle();
  };
  theme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  byId("theme").onclick = () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");

  document.addEventListener("keydown", (event) => {
    const typing = event.target.matches("input, select, textarea");
    if (event.key === "/" && !typing) {
      event.preventDefault();
      if (tab !== "graph") htp.tab("modules");
      byId(tab === "graph" ? "graph-search" : "search").focus();
    }
    if (event.key === "Escape" && event.target === byId("search")) {
      byId("search").value = "";
      byId("search").dispatchEvent(new Event("input"));
      byId("table").focus();
    }
  });
  document.addEventListener("click", (event) => !event.target.closest("#columns") && (byId("columns").open = false));

  // The tab, what is selected and what is searched for stand in the address, so that a link shows them. A node is known
  // by its name, or by its place where another has the same one. "#layer.3" alone is a module.
  const times = new Map();
  for (const node of htp.nodes) times.set(node.name, (times.get(node.name) ?? 0) + 1);
  const named = new Map(htp.nodes.map((node) => [node.name && times.get(node.name) === 1 ? node.name : `#${node.id}`, node]));
  const nameOf = new Map([...named].map(([name, node]) => [node, name]));
  let begun = false;
  function remember() {
    if (!begun) return;
    const state = new URLSearchParams();
    const item = htp.selected;
    if (htp.shown) state.set("part", htp.shown);
    if (tab !== "modules") state.set("tab", tab);
    if (item?.kind === "node") state.set("node", nameOf.get(item));
    else if (item?.kind === "fold") state.set("modules", item.path);
    else if (item?.path) state.set("module", item.path);
    const sought = byId(tab === "graph" ? "graph-search" : "search").value.trim();
    if (sought) state.set("search", sought);
    const text = state.toString();
    if (text === location.hash.slice(1)) return;
    try {
      history.replaceState(null, "", `#${text}`);
    } catch { /* a page inside of another has no address of its own */ }
  }
  function restore() {
    if (htp.asked() !== htp.shown) return location.reload();
    begun = false;
    let given = location.hash.slice(1);
    try {
      given = decodeURIComponent(given);
    } catch { /* not written by this page; taken as it is */ }
    const plain = htp.byPath.get(given);
    const state = new URLSearchParams(plain ? "" : location.hash.slice(1));
    const module = htp.byPath.get(state.get("module"));
    const first = htp.byPath.get(state.get("modules"));
    const item = plain ?? named.get(state.get("node")) ?? (first && (htp.table.foldOf(first) ?? first)) ?? module ?? htp.root;
    htp.select(item);
    const shown = TABS.includes(state.get("tab")) ? state.get("tab") : "modules";
    const sought = state.get("search") ?? "";
    byId("search").value = shown === "graph" ? "" : sought;
    byId("graph-search").value = shown === "graph" ? sought : "";
    htp.table.look();
    htp.tab(shown);
    byId("graph-search").dispatchEvent(new Event("input"));
    begun = true;
  }
  htp.listeners.push(remember);
  for (const field of ["search", "graph-search"]) byId(field).addEventListener("input", remember);
  window.addEventListener("hashchange", restore);
  restore();
  byId("table").focus();
  document.documentElement.dataset.ready = "yes";
})();
