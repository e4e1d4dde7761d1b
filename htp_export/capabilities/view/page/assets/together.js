"use strict";
// Several files as one table: a row for each module, and for each number a column of every file. A click on a number
// shows the graphs of the module in that file and in the one that it is compared with.
(async function () {
  const ROW = 28;
  const AT_FIRST = 32; // rows that are opened to at most, at first
  const FEWEST = 0.004; // of a number; a smaller difference has no colour
  const data = JSON.parse(document.getElementById("data").textContent);
  const content = await htp.unpacked(document.getElementById("content"));
  const byId = (id) => document.getElementById(id);
  const [table, groupsOfHead, head, body, search, base] = ["table", "groups", "head", "rows", "search", "base"].map(byId);

  // --- rows, files and numbers

  const rows = content.rows.map(([path], id) => ({ id, path, children: [], open: false }));
  content.rows.forEach(([, above], id) => {
    const row = rows[id];
    row.above = above === null ? null : rows[above];
    row.above?.children.push(row);
    row.depth = row.above ? row.above.depth + 1 : 0;
    row.label = row.above?.path && row.path.startsWith(`${row.above.path}.`) ? row.path.slice(row.above.path.length + 1) : row.path || "(root)";
  });
  const { words } = content;
  const files = content.files.map((file, id) => ({
    id, name: data.files[id].name, graph: file.graph, words,
    has: (row) => file.structure[row.id] >= 0,
    structureOf: (row) => file.structure[row.id],
    classOf: (row) => words[file.class[row.id]] ?? "",
    nodesOf: (row) => file.nodes[row.id],
    pathOf: (row) => file.moved[row.id] ?? row.path,
    valuesOf: (key) => file.values[key] ?? file[key] ?? [],
  }));
  // A group of columns: one number, or one word, of every file.
  const BUILT_IN = [["nodes", "nodes", ""], ["parameters", "parameters", ""], ["weight_bytes", "weights", "B"]];
  const numbers = [
    ...data.measures.map((measure, id) => ({ ...measure, source: id })),
    ...BUILT_IN.map(([source, title, unit]) => ({ key: source, title, unit, source, main: true, named: false })),
  ];
  const graphs = { key: "graph", title: "graph is", isStatus: true };
  for (const number of numbers) {
    const values = files.map((file) => file.valuesOf(number.source));
    number.of = (row, file) => (number.named ? words[values[file.id][row.id]] ?? null : htp.number(values[file.id][row.id]));
  }
  const COMMON = ["nodes", "parameters"]; // shown if there is little else
  const mains = numbers.filter((number) => number.main);
  const shown = new Set(mains.length > 5 ? mains.filter((number) => !COMMON.includes(number.key)) : mains);
  const state = { rows: [], selected: rows[0], base: files[0], other: files[1], sort: null, descending: true };
  // The graphs are compared with that of one file, which needs no column.
  const filesOf = (group) => (group.isStatus ? files.filter((file) => file !== state.base) : files);
  const groups = () => [graphs, ...numbers.filter((number) => shown.has(number))];

  // Whether the graph of a module is that of the file that all are compared with.
  function statusOf(row, file) {
    if (!file.has(row)) return "";
    if (!state.base.has(row)) return "added";
    return file.structureOf(row) === state.base.structureOf(row) ? "same" : "changed";
  }
  const differs = (row) => new Set(files.map((file) => file.structureOf(row))).size > 1 || numbers.some((number) => number.named && new Set(files.map((file) => number.of(row, file))).size > 1);
  const stirred = new Map();
  function isStirred(row) {
    if (!stirred.has(row)) stirred.set(row, differs(row) || row.children.map(isStirred).some(Boolean));
    return stirred.get(row);
  }

  // --- what is drawn

  function matches(row, wanted) {
    const said = [row.path, ...files.filter((file) => file.has(row)).map((file) => `${file.pathOf(row)} ${file.classOf(row)}`)].join("\n").toLowerCase();
    return wanted.every((word) => said.includes(word));
  }
  function bySort(one, other) {
    const { number, file } = state.sort;
    const turn = state.descending ? -1 : 1;
    const [a, b] = [number.of(one, file), number.of(other, file)];
    if (a === null || b === null) return (a === null) - (b === null) || one.id - other.id;
    return turn * (number.named ? a.localeCompare(b) : a - b) || one.id - other.id;
  }
  const sorted = (list) => (state.sort ? [...list].sort(bySort) : list);

  function arrange() {
    const wanted = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const only = byId("changed").checked;
    const hits = rows.filter((row) => (!only || isStirred(row)) && matches(row, wanted));
    if (byId("flat").checked) state.rows = sorted(hits);
    else {
      const kept = new Set();
      for (const hit of hits) for (let row = hit; row && !kept.has(row); row = row.above) kept.add(row);
      state.rows = [];
      (function add(row) {
        if (!kept.has(row)) return;
        state.rows.push(row);
        if (row.open || wanted.length) sorted(row.children).forEach(add);
      })(rows[0]);
    }
    body.style.height = `${state.rows.length * ROW}px`;
    byId("hits").textContent = wanted.length || only ? `${hits.length.toLocaleString("en")} of ${rows.length.toLocaleString("en")} modules` : "";
    table.setAttribute("aria-rowcount", state.rows.length + 2);
    draw();
  }

  function drawHead() {
    const list = groups();
    const width = (group) => (group.isStatus ? 88 : 96);
    const columns = list.map((group) => `${width(group)}px `.repeat(filesOf(group).length)).join("");
    document.documentElement.style.setProperty("--layout", `minmax(220px, 1fr) ${columns}`);
    document.documentElement.style.setProperty("--least", `${220 + list.reduce((sum, group) => sum + width(group) * filesOf(group).length, 0)}px`);
    table.setAttribute("aria-colcount", 1 + list.reduce((sum, group) => sum + filesOf(group).length, 0));
    const unit = (group) => (group.unit && group.unit !== "B" ? ` ${group.unit}` : "");
    groupsOfHead.replaceChildren(htp.make("div", { className: "name", role: "columnheader" }), ...list.map((group) => htp.make("div", { role: "columnheader", textContent: group.title + unit(group), style: { gridColumn: `span ${filesOf(group).length}` } })));
    head.replaceChildren(htp.make("div", { className: "name", role: "columnheader", textContent: "module" }), ...list.flatMap((group) => filesOf(group).map((file, k) => headCell(group, file, k))));
  }
  function headCell(number, file, k) {
    const isSorted = state.sort?.number === number && state.sort.file === file;
    const cell = htp.make("div", { role: "columnheader", tabIndex: number.isStatus ? -1 : 0, className: `number${k ? "" : " starts"}${file === state.base ? " base" : ""}`, textContent: file.name + (isSorted ? (state.descending ? " ↓" : " ↑") : ""), title: `${file.name}${number.isStatus ? "" : "\nA click sorts, a second one the other way, a third one as in the model"}` });
    if (number.isStatus) return cell;
    cell.setAttribute("aria-sort", isSorted ? (state.descending ? "descending" : "ascending") : "none");
    cell.onclick = () => sortBy(number, file);
    cell.onkeydown = (event) => {
      if (event.key !== "Enter") return;
      event.stopPropagation();
      sortBy(number, file);
    };
    return cell;
  }
  function sortBy(number, file) {
    const isSorted = state.sort?.number === number && state.sort.file === file;
    if (!isSorted) Object.assign(state, { sort: { number, file }, descending: !number.named });
    else if (state.descending === !number.named) state.descending = !state.descending;
    else state.sort = null;
    drawHead();
    arrange();
  }

  // The colour of a number: how much more or less it is than that of the file that all are compared with.
  function tint(value, before) {
    if (!Number.isFinite(value) || !Number.isFinite(before) || value === before) return "";
    const part = (value - before) / Math.max(Math.abs(value), Math.abs(before));
    if (Math.abs(part) < FEWEST) return "";
    return `color-mix(in srgb, var(--${part > 0 ? "more" : "less"}) ${Math.round(6 + 40 * Math.min(1, Math.abs(part)))}%, transparent)`;
  }
  function cellOf(row, number, file, k) {
    const classes = ["number", ...(k ? [] : ["starts"]), ...(file.has(row) ? [] : ["absent"])];
    if (pair.state.row === row && pair.state.sides.some((side) => side.file === file)) classes.push("shown");
    const cell = htp.make("div", { role: "gridcell" });
    if (number.isStatus) {
      const status = statusOf(row, file);
      const path = file.pathOf(row);
      if (file.has(row)) cell.append(htp.make("span", { className: status, textContent: path === row.path || status !== "same" ? status : "moved" }));
      cell.title = file.has(row) && path !== row.path ? `${path} in ${file.name}` : file.has(row) ? file.classOf(row) : `${file.name} does not have this module`;
    } else {
      const [value, before] = [number.of(row, file), number.of(row, state.base)];
      cell.textContent = value === null ? "" : number.named ? value : htp.compact(value, number.unit);
      if (!number.named && value !== null) cell.title = [htp.exact(value, number.unit), change(value, before)].filter(Boolean).join("\n");
      if (number.named && value !== before && value !== null) classes.push("other");
      if (!number.named && file !== state.base) cell.style.background = tint(value, before);
    }
    cell.className = classes.join(" ");
    cell.onclick = (event) => {
      event.stopPropagation();
      choose(row, file);
    };
    return cell;
  }
  function change(value, before) {
    if (!Number.isFinite(value) || !Number.isFinite(before) || value === before || !before) return "";
    const percent = (100 * (value - before)) / Math.abs(before);
    return `${percent > 0 ? "+" : ""}${Number(percent.toPrecision(3))} % of that of ${state.base.name}`;
  }

  function rowElement(row, index) {
    const isFlat = byId("flat").checked;
    const open = row.open || Boolean(search.value.trim());
    const arrow = htp.make("span", { className: `arrow${open ? " open" : ""}`, textContent: row.children.length && !isFlat ? "▶" : "" });
    const name = htp.make("div", { className: "name", role: "gridcell", title: row.path },
      htp.make("span", { className: "guide", style: { width: `${isFlat ? 0 : row.depth * 14}px` } }), arrow,
      htp.make("span", { className: "label path", textContent: isFlat ? row.path || "(root)" : row.label }));
    const cells = groups().flatMap((group) => filesOf(group).map((file, k) => cellOf(row, group, file, k)));
    const element = htp.make("div", { className: `row${row === state.selected ? " selected" : ""}`, role: "row", id: `row-${index}` }, name, ...cells);
    element.style.top = `${index * ROW}px`;
    element.setAttribute("aria-level", row.depth + 1);
    element.setAttribute("aria-rowindex", index + 3);
    element.setAttribute("aria-selected", row === state.selected);
    if (row.children.length && !isFlat) element.setAttribute("aria-expanded", open);
    element.onclick = (event) => (event.target === arrow ? toggle(row) : select(row));
    element.ondblclick = (event) => event.target !== arrow && toggle(row);
    return element;
  }
  function draw() {
    const from = Math.max(0, Math.floor(table.scrollTop / ROW) - 8);
    const to = Math.min(state.rows.length, Math.ceil((table.scrollTop + table.clientHeight) / ROW) + 8);
    body.replaceChildren(...state.rows.slice(from, to).map((row, k) => rowElement(row, from + k)));
    const at = state.rows.indexOf(state.selected);
    if (at >= from && at < to) table.setAttribute("aria-activedescendant", `row-${at}`);
    else table.removeAttribute("aria-activedescendant");
  }

  // --- what users do

  function select(row) {
    state.selected = row;
    draw();
  }
  function toggle(row, open = !row.open) {
    row.open = open;
    arrange();
  }
  // The graphs of a module in a file, and in the one that it is compared with.
  function choose(row, file) {
    if (file !== state.base) state.other = file;
    state.selected = row;
    const other = state.other === state.base ? files.find((each) => each !== state.base) : state.other;
    if (state.base.has(row) || other.has(row)) pair.show(row, state.base, other);
    scrollTo(row);
  }
  function scrollTo(row) {
    const [top, room] = [state.rows.indexOf(row) * ROW, table.clientHeight - head.parentElement.offsetHeight - ROW];
    if (top < table.scrollTop) table.scrollTop = top;
    if (top > table.scrollTop + room) table.scrollTop = top - room;
    draw();
  }
  const pair = htp.pair({ rows, changed: () => draw() });

  table.addEventListener("keydown", (event) => {
    const at = state.rows.indexOf(state.selected);
    const go = (to) => {
      const next = state.rows[Math.max(0, Math.min(state.rows.length - 1, to))];
      if (next) [select, scrollTo].forEach((each) => each(next));
    };
    const page = Math.max(1, Math.floor(table.clientHeight / ROW) - 3);
    const keys = {
      ArrowDown: () => go(at + 1), ArrowUp: () => go(at - 1), PageDown: () => go(at + page), PageUp: () => go(at - page), Home: () => go(0), End: () => go(state.rows.length - 1),
      ArrowRight: () => (state.selected.open || !state.selected.children.length ? go(at + 1) : toggle(state.selected, true)),
      ArrowLeft: () => (state.selected.open ? toggle(state.selected, false) : state.selected.above && go(state.rows.indexOf(state.selected.above))),
      Enter: () => choose(state.selected, state.other),
    };
    if (!keys[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    keys[event.key]();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") pair.close();
    if (event.key !== "/" || event.target.matches("input, select")) return;
    event.preventDefault();
    search.focus();
  });
  search.oninput = arrange;
  byId("changed").onchange = arrange;
  byId("flat").onchange = arrange;
  base.append(...files.map((file) => htp.make("option", { value: file.id, textContent: file.name })));
  base.onchange = () => {
    state.base = files[base.value];
    if (state.other === state.base) state.other = files.find((each) => each !== state.base);
    if (pair.state.row) pair.show(pair.state.row, state.base, state.other);
    drawHead();
    arrange();
  };
  document.querySelector("#columns > div").append(...numbers.map((number) => {
    const box = htp.make("input", { type: "checkbox", checked: shown.has(number) });
    box.onchange = () => {
      shown[box.checked ? "add" : "delete"](number);
      drawHead();
      draw();
    };
    return htp.make("label", {}, box, number.title);
  }));
  document.addEventListener("click", (event) => !event.target.closest("#columns") && (byId("columns").open = false));
  table.addEventListener("scroll", draw);
  new ResizeObserver(draw).observe(table);

  // --- the top of the page

  byId("name").textContent = files.map((file) => file.name).join(" · ");
  const count = (number, word) => `${number.toLocaleString("en")} ${word}${number === 1 ? "" : "s"}`;
  byId("facts").textContent = [count(files.length, "file"), count(rows.length, "module"), `${data.files.map((file) => file.nodes.toLocaleString("en")).join(", ")} nodes`].join(" · ");
  byId("trust").append(...data.files.flatMap((file) => [tagsLine(htp.make, file.name, file), ...file.notes.map((note) => htp.make("div", { className: "advice", textContent: `${file.name}: ${note}` }))]));
  const theme = (name) => (document.documentElement.dataset.theme = name);
  theme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  byId("theme").onclick = () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");

  // At first, as many levels as fit on a screen.
  let level = [rows[0]];
  let opened = 1;
  while (level.length) {
    const next = level.flatMap((row) => row.children);
    opened += next.length;
    if (opened > AT_FIRST && level[0] !== rows[0]) break;
    for (const row of level) row.open = true;
    level = next;
  }
  htp.together = { state, rows, files, choose };
  drawHead();
  arrange();
  table.focus();
  document.documentElement.dataset.ready = "yes";
})();
