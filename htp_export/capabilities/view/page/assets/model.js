"use strict";
// The data of the page: modules and nodes of the graph that is shown, and their numbers.

// A page has one graph or several; the address says which one is shown, so that the others need not be read.
htp.graphs = JSON.parse(document.getElementById("graphs").textContent);
htp.asked = () => {
  const asked = new URLSearchParams(location.hash.slice(1)).get("part");
  return Object.hasOwn(htp.graphs, asked) ? Number(asked) : 0;
};
htp.shown = htp.asked();
htp.data = JSON.parse(document.getElementById(htp.shown ? `data-${htp.shown}` : "data").textContent);

htp.FATES = { ...htp.data.fates, failed: { meaning: "it could not be exported", tone: "bad", remark: "failed" } };
htp.REASONS = REASONS;

(function prepare(data) {
  htp.modules = data.modules.map((module, id) => ({ ...module, id, kind: "module", children: [], fate: module.failure ? "failed" : module.fate }));
  htp.nodes = data.nodes.map((node, id) => ({ ...node, id, kind: "node" }));
  for (const module of htp.modules) {
    module.above = module.parent === null ? null : htp.modules[module.parent];
    module.above?.children.push(module);
    module.label = !module.above ? module.path || "(root)" : module.above.path ? module.path.slice(module.above.path.length + 1) : module.path;
    module.own = module.own.map((id) => htp.nodes[id]);
  }
  // A module may stand before the one that holds it.
  for (let level = htp.modules.filter((module) => !module.above), depth = 0; level.length; depth++) {
    for (const module of level) module.depth = depth;
    level = level.flatMap((module) => module.children);
  }
  for (const run of data.repeats) {
    const members = run.map((id) => htp.modules[id]);
    let fold = null;
    const one = { get fold() { return (fold ??= htp.folded(members.map((module) => [module]), members[0].above)); } };
    for (const module of members) module.run = one;
  }
  htp.root = htp.modules[0];
  htp.byPath = new Map(htp.modules.map((module) => [module.path, module]));
  htp.loose = htp.nodes.filter((node) => !node.owners.length && htp.data.tags.source !== "none");
  // The modules that read a weight themselves; where there are several, it is tied, or was merged with an equal one.
  htp.readersOf = new Map();
  for (const module of htp.modules) for (const [name] of module.weights) htp.readersOf.set(name, [...(htp.readersOf.get(name) ?? []), module]);
  // Parameters that several modules hold: at each of them, the others, and at which it counts.
  htp.ties = new Map();
  const tie = (module, said) => module && htp.ties.set(module, [...(htp.ties.get(module) ?? []), said]);
  for (const module of htp.modules) {
    for (const [name, first] of Object.entries(module.tied ?? {})) {
      const holder = first.slice(0, Math.max(0, first.lastIndexOf(".")));
      tie(module, `${name} is ${first}, and counts there`);
      tie(htp.byPath.get(holder), `${first} is ${name}, too, and counts here`);
    }
  }
  const built = [
    { key: "nodes", title: "nodes", unit: "", additive: true, main: true, of: (module) => module.nodes },
    { key: "parameters", title: "parameters", unit: "", additive: true, main: true, of: (module) => module.parameters, ofNode: (node) => node.parameters ?? null, isSaid: () => true, once: (module) => module.counted?.[0] ?? module.parameters },
    { key: "weight_bytes", title: "weights", unit: "B", additive: true, main: false, of: (module) => module.bytes, once: (module) => module.counted?.[1] ?? module.bytes },
  ];
  const given = data.measures.map((measure) => {
    const total = measure.total.map(htp.number);
    const own = measure.own.map(htp.number);
    const said = measure.said === true ? null : new Set(measure.said);
    const byNode = { ofNode: (node) => measure.nodes[node.id] ?? null, isSaid: (node) => !said || said.has(node.id) };
    return { ...measure, ...byNode, of: (module) => total[module.id] ?? null, ownOf: (module) => own[module.id] ?? null };
  });
  htp.columns = [...given.filter((column) => column.main), ...built, ...given.filter((column) => !column.main)];
  for (const column of htp.columns) {
    const values = htp.modules.map(column.of).filter((value) => Number.isFinite(value));
    column.most = Math.max(0, ...values.map(Math.abs));
    if (column.named) column.kinds = [...new Set(Object.values(column.words))];
  }
})(htp.data);

// Alike siblings as one item: `sets` has, for each of them, the modules that it stands for; there are several where what
// is above is folded, too. Its children are what its modules have in common: folds again, until it is taken apart.
htp.folded = function (sets, above) {
  const [first] = sets[0];
  const members = sets.flat();
  const last = sets.at(-1)[0].label;
  const label = sets.length > 1 ? `${first.label} … ${last}` : first.label;
  // Where there is little room: names of alike siblings differ in their last number.
  const short = sets.length > 1 ? `${first.label}…${last.match(/\d*$/)[0]}` : first.label;
  const fold = { kind: "fold", id: first.id, path: first.path, class: first.class, fate: first.fate, calls: first.calls, nodes: first.nodes, own: [], sets, members, label, short, above };
  let parts = null;
  let each = null;
  Object.defineProperties(fold, {
    children: { get: () => (parts ??= htp.runs(first.children).map((run) => {
      const places = run.map((child) => first.children.indexOf(child));
      return htp.folded(places.map((place) => members.map((member) => member.children[place])), fold);
    })) },
    each: { get: () => (each ??= sets.map((set) => (set.length > 1 ? htp.folded([set], fold) : set[0]))) },
  });
  return fold;
};
// Siblings in runs of alike ones.
htp.runs = function (siblings) {
  const found = [];
  for (const module of siblings) {
    if (module.run && found.at(-1)?.[0].run === module.run) found.at(-1).push(module);
    else found.push([module]);
  }
  return found;
};
// What a column says of a module; of several, as in the terminal: the mean, or the largest of what does not add up.
htp.value = function (item, column) {
  if (item.kind === "node") return column.ofNode?.(item) ?? null;
  if (item.kind !== "fold") return column.of(item);
  const values = item.members.map(column.of).filter((value) => value !== null);
  if (!values.length) return null;
  if (column.additive) return values.reduce((sum, value) => sum + value, 0) / values.length;
  return values.some(Number.isNaN) ? NaN : Math.max(...values);
};

// The word that a column has for an item: that of its module; of several, the one that they share.
htp.word = function (item, column) {
  const modules = item.kind === "fold" ? item.members : item.kind === "node" ? item.owners.map((path) => htp.byPath.get(path)) : [item];
  const said = new Set(modules.map((module) => (module?.kind === "module" && column.words[module.id]) || ""));
  return said.size === 1 ? [...said][0] : [...said].filter(Boolean).join(", ");
};

// Times have shares of the whole.
htp.time = htp.columns.find((column) => column.unit === "ms" && column.main && column.of(htp.root) > 0);
htp.part = (value, column) => (column === htp.time && Number.isFinite(value) ? value / column.of(htp.root) : null);
htp.share = function (value, column) {
  const percent = 100 * htp.part(value, column);
  return percent ? `${percent < 0.1 ? "<0.1" : percent < 9.95 ? percent.toFixed(1) : percent.toFixed(0)} %` : "";
};

// What tells alike modules apart: of their paths, the part that differs, with the name before a number.
htp.labels = function (members) {
  const paths = members.map((member) => member.path.split("."));
  const first = paths[0];
  const differs = (k) => paths.some((parts) => parts[k] !== first[k]);
  const places = [...first.keys()].filter(differs);
  if (!places.length || paths.some((parts) => parts.length !== first.length)) return members.map((member) => member.path);
  const from = /^\d+$/.test(first[places[0]]) && places[0] > 0 ? places[0] - 1 : places[0];
  return paths.map((parts) => parts.slice(from, places.at(-1) + 1).join("."));
};

htp.withUnit = (value, column) => htp.compact(value, column.unit) + (column.unit === "ms" && value !== null ? " ms" : "");
htp.title = (item) => (item.kind === "node" ? item.name || item.op : item.path || "(root)");

// What is selected; whoever shows it is told of changes.
htp.listeners = [];
htp.selected = null;
htp.select = function (item, by = null) {
  if (htp.selected === item) return;
  htp.selected = item;
  for (const listener of htp.listeners) listener(item, by);
};
