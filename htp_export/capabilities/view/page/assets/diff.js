"use strict";
// Two module trees, aligned by path. As in the page of one model, everything from the files is put in as text.
(function () {
  const ROW = 28;
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const [table, head, body, search] = ["table", "head", "rows", "search"].map(byId);
  const items = data.rows.map((row) => ({ ...row, children: [], open: false, run: null }));
  for (const run of data.repeats) for (const place of run) items[place].run = run.map((each) => items[each]);
  const state = { rows: [], selected: items[0], words: "", repeats: data.repeats.length > 0 };

  function make(tag, properties = {}, ...children) {
    const element = Object.assign(document.createElement(tag), properties);
    element.append(...children);
    return element;
  }

  const places = new Map(items.map((item) => [item.path, item]));
  for (const item of items) {
    let above = item.path;
    while (above && !item.above) {
      above = above.includes(".") ? above.slice(0, above.lastIndexOf(".")) : "";
      item.above = places.get(above);
    }
    item.above?.children.push(item);
    item.depth = item.above ? item.above.depth + 1 : 0;
    item.label = item.above?.path ? item.path.slice(item.above.path.length + 1) : item.path || "(root)";
  }
  // What changed below shows at what holds it, too.
  const stirred = (item) => (item.stirs ??= item.status !== "same" || item.children.map(stirred).some(Boolean));
  items.forEach(stirred);
  for (const item of items) item.open = item.depth < 2 || (item.stirs && item.depth < 4 && items.length < 600);

  function text(value) {
    if (value === null || value === undefined) return "";
    if (typeof value === "object") return Object.entries(value).map(([name, each]) => `${name} ${text(each)}`).join(", ");
    return typeof value === "number" ? value.toLocaleString("en", Number.isInteger(value) ? {} : { maximumSignificantDigits: 6 }) : String(value);
  }
  // What a column shows: bytes by element type are summed.
  const BYTES = "weight_bytes";
  const SHARED = "shared_bytes"; // of these, what other modules read too
  const held = (side, column) => (column === BYTES && side ? total(side[BYTES]) - total(side[SHARED]) : side?.[column]); // grows and shrinks
  const total = (sizes) => Object.values(sizes ?? {}).reduce((sum, each) => sum + each, 0);
  const alone = (sum, shared) => (shared ? [...(sum > shared ? [bytesText(sum - shared)] : []), `${bytesText(shared)} shared`].join(" + ") : bytesText(sum));
  const simple = (name) => String(name ?? "").slice(String(name ?? "").lastIndexOf(".") + 1);

  function matches(item) {
    const said = `${item.path} ${item.before?.class_name ?? ""} ${item.after?.class_name ?? ""}`.toLowerCase();
    return state.words.split(/\s+/).every((word) => said.includes(word));
  }

  // Siblings that are alike, and changed alike, are one row.
  const folds = (item) => state.repeats && !state.words && item.run !== null;
  const label = (item) => (folds(item) ? `${item.label} … ${item.run.at(-1).label}` : item.label);

  function arrange() {
    const only = byId("changed").checked;
    const wanted = new Set();
    for (const item of items) {
      if ((only && !item.stirs) || !matches(item)) continue;
      for (let each = item; each && !wanted.has(each); each = each.above) wanted.add(each);
    }
    state.rows = [];
    const add = (item) => {
      if (!wanted.has(item)) return;
      if (folds(item) && item.run[0] !== item) return; // the first stands for all
      state.rows.push(item);
      if (item.open || state.words) item.children.forEach(add);
    };
    items.filter((item) => !item.above).forEach(add);
    body.style.height = `${state.rows.length * ROW}px`;
    byId("hits").textContent = `${state.rows.length.toLocaleString("en")} of ${items.length.toLocaleString("en")} modules`;
    draw();
  }

  function cell(item, column) {
    const [before, after] = [held(item.before, column), held(item.after, column)];
    const sizes = [item.before, item.after].map((side) => [total(side?.[BYTES]), total(side?.[SHARED])]);
    const split = column === BYTES && item.before && item.after && sizes[0][0] !== sizes[1][0];
    const said = (side, [sum, shared]) => (column === BYTES && side ? alone(sum, split ? shared : 0) : text(side?.[column]));
    const [first, second] = [said(item.before, sizes[0]), said(item.after, sizes[1])];
    const element = make("div", { className: "number", title: `${first || "–"} → ${second || "–"}` });
    if (first === second) return element.append(second), element;
    if (first) element.append(make("span", { className: "was", textContent: first }));
    const grew = typeof before === "number" && typeof after === "number" && before !== after ? (after > before ? "more-is" : "less-is") : "";
    element.append(make("span", { className: grew, textContent: second || (item.after ? "" : "–") }));
    return element;
  }

  function classes(item) {
    const [before, after] = [simple(item.before?.class_name), simple(item.after?.class_name)];
    const element = make("div", { className: "class" });
    if (before && after && before !== after) element.append(make("span", { className: "was", textContent: before }));
    element.append(after || before);
    return element;
  }

  function rowElement(item, index) {
    const arrow = make("span", { className: `arrow${item.open || state.words ? " open" : ""}`, textContent: item.children.length ? "▶" : "" });
    const guide = make("span", { className: "guide" });
    guide.style.width = `${item.depth * 16}px`;
    const row = make("div", { className: `row ${item.status}${item === state.selected ? " selected" : ""}` },
      make("div", { className: "name" }, guide, arrow, make("span", { className: "label path", textContent: label(item) }),
        ...(folds(item) ? [make("span", { className: "times", textContent: `× ${item.run.length}` })] : [])),
      classes(item), ...data.columns.map((column) => cell(item, column)),
      make("div", {}, ...(item.status === "same" ? [] : [make("span", { className: `pill ${item.status}`, textContent: item.status })])));
    row.setAttribute("role", "row");
    row.style.top = `${index * ROW}px`;
    row.onclick = (event) => {
      if (event.target === arrow) return (item.open = !item.open), arrange();
      select(item);
    };
    row.ondblclick = () => ((item.open = !item.open), arrange());
    return row;
  }

  function draw() {
    const from = Math.max(0, Math.floor(table.scrollTop / ROW) - 8);
    const to = Math.min(state.rows.length, Math.ceil((table.scrollTop + table.clientHeight) / ROW) + 8);
    body.replaceChildren(...state.rows.slice(from, to).map((item, k) => rowElement(item, from + k)));
  }

  function select(item) {
    state.selected = item;
    const names = [...new Set([...Object.keys(item.before?.operators ?? {}), ...Object.keys(item.after?.operators ?? {})])];
    const pairs = names.map((name) => [name, item.before?.operators?.[name] ?? 0, item.after?.operators?.[name] ?? 0]);
    const fields = [...new Set([...Object.keys(item.before ?? {}), ...Object.keys(item.after ?? {})])].filter((name) => !["operators", BYTES, SHARED].includes(name) && (name !== "path" || item.before?.path !== item.after?.path));
    const list = make("dl");
    for (const name of fields) {
      const [before, after] = [text(item.before?.[name]), text(item.after?.[name])];
      list.append(make("dt", { textContent: name.replaceAll("_", " ") }), make("dd", { textContent: before === after ? after : `${before || "–"} → ${after || "–"}` }));
    }
    const types = [...new Set([item.before, item.after].flatMap((side) => Object.keys(side?.[BYTES] ?? {})))];
    const weights = make("dl", {}, ...types.flatMap((type) => {
      const sides = [item.before, item.after].map((side) => [side?.[BYTES]?.[type] ?? 0, side?.[SHARED]?.[type] ?? 0]);
      const [[before, after], [first, second]] = [sides.map(([sum, shared]) => sum - shared), sides.map(([sum, shared]) => alone(sum, sides[0][0] === sides[1][0] ? 0 : shared))];
      return [make("dt", { textContent: type }), make("dd", { textContent: first === second ? second : `${first} → ${second}`, className: before === after ? "" : after > before ? "more-is" : "less-is" })];
    }));
    const operators = make("dl");
    for (const [name, before, after] of pairs.sort((a, b) => Math.abs(b[2] - b[1]) - Math.abs(a[2] - a[1]))) {
      operators.append(make("dt", { textContent: name }), make("dd", { textContent: before === after ? text(after) : `${before} → ${after}`, className: before === after ? "" : after > before ? "more-is" : "less-is" }));
    }
    byId("detail").replaceChildren(make("h2", { className: "path", textContent: item.path || "(root)" }), make("p", { className: "kind", textContent: folds(item) ? `${item.status}, and so are ${item.run.length - 1} more that are alike, up to ${item.run.at(-1).path}` : item.status }), list,
      ...(types.length ? [make("h3", { textContent: "Weights" }), weights] : []),
      ...(pairs.length ? [make("h3", { textContent: "Operators" }), operators] : []));
    draw();
  }

  table.addEventListener("keydown", (event) => {
    const at = state.rows.indexOf(state.selected);
    const go = (to) => {
      const next = state.rows[Math.max(0, Math.min(state.rows.length - 1, to))];
      if (!next) return;
      const top = state.rows.indexOf(next) * ROW;
      if (top < table.scrollTop) table.scrollTop = top;
      if (top + 2 * ROW > table.scrollTop + table.clientHeight) table.scrollTop = top + 2 * ROW - table.clientHeight;
      select(next);
    };
    const fold = (open) => ((state.selected.open = open), arrange());
    const keys = { ArrowDown: () => go(at + 1), ArrowUp: () => go(at - 1), Home: () => go(0), End: () => go(state.rows.length - 1), ArrowRight: () => fold(true), ArrowLeft: () => (state.selected.open ? fold(false) : go(state.rows.indexOf(state.selected.above))), Enter: () => fold(!state.selected.open) };
    if (!keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
  });
  search.oninput = () => ((state.words = search.value.toLowerCase().trim()), arrange());
  byId("changed").onchange = arrange;
  byId("repeats").checked = state.repeats;
  byId("repeats").parentElement.hidden = !state.repeats;
  byId("repeats").onchange = () => ((state.repeats = byId("repeats").checked), arrange(), select(state.selected));
  table.addEventListener("scroll", draw);
  new ResizeObserver(draw).observe(table);

  const layout = `minmax(240px, 2.4fr) minmax(140px, 1fr) ${data.columns.map(() => "165px ").join("")}110px`;
  document.documentElement.style.setProperty("--layout", layout);
  document.documentElement.style.setProperty("--least", `${240 + 140 + 165 * data.columns.length + 110}px`);
  head.append(...["module", "class", ...data.columns.map((name) => name === BYTES ? "weights" : name.replaceAll("_", " ")), ""].map((name, k) => make("div", { className: k > 1 ? "number" : "", textContent: name })));
  byId("name").textContent = `${data.before} → ${data.after}`;
  const counted = {};
  for (const item of items) counted[item.status] = (counted[item.status] ?? 0) + 1;
  byId("facts").textContent = Object.entries(counted).map(([status, count]) => `${count.toLocaleString("en")} ${status}`).join("  ·  ");
  byId("trust").append(...data.files.map((file) => tagsLine(make, file.name, file)), ...data.notes.map((note) => make("div", { className: "advice", textContent: note })));
  const theme = (name) => (document.documentElement.dataset.theme = name);
  theme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  byId("theme").onclick = () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
  arrange();
  if (items.length) select(items[0]);
  document.documentElement.dataset.ready = "yes";
})();
