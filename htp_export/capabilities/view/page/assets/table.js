"use strict";
// The tree as a table. Only the rows in sight are in the page, so that its length does not matter.
(function () {
  const ROW = 28;
  const MOST_COPIED = 200; // modules in a selector that a search makes
  const table = document.getElementById("table");
  const head = document.getElementById("head");
  const body = document.getElementById("rows");
  const search = document.getElementById("search");
  const state = { open: new Set(), apart: new Set(), repeats: htp.data.repeats.length > 0, sort: htp.time ?? null, descending: true, flat: false, query: null, hits: 0, rows: [] };
  // Where there is little room, classes are said of what is selected alone; names stay in sight while numbers are scrolled.
  const room = () => (table.clientWidth >= 720 ? "wide" : table.clientWidth >= 480 ? "narrow" : "phone");
  const WIDTHS = { wide: { name: 220, class: 110, number: 106, fate: 110 }, narrow: { name: 196, class: 0, number: 92, fate: 98 }, phone: { name: 166, class: 0, number: 86, fate: 92 } };
  let drawnFor = room();
  const hasClass = () => drawnFor === "wide";
  const nothing = document.getElementById("nothing");
  const shown = new Set(htp.columns.filter((column) => column.main).map((column) => column.key));
  const OTHER = { kind: "loose", id: -1, children: [], own: htp.loose, label: "nodes of no module", path: "" };

  // A row: { item, depth }. Modules come before the nodes that their module computes itself.
  function below(item) {
    if (item.kind === "node") return [];
    if (item.kind === "loose") return item.own;
    const modules = inside(item);
    const nodes = [...item.own];
    if (state.sort) modules.sort(bySort);
    if (state.sort?.ofNode) nodes.sort(bySort);
    return [...modules, ...nodes, ...(item === htp.root && OTHER.own.length ? [OTHER] : [])];
  }

  // The modules right below, alike ones as one; a search shows each that it found.
  function inside(item) {
    if (item.kind === "fold") return [...(state.apart.has(item) ? item.each : item.children)];
    if (!state.repeats || state.query) return [...item.children];
    return htp.runs(item.children).map((run) => (run.length > 1 ? run[0].run.fold : run[0]));
  }

  function bySort(a, b) {
    const turn = state.descending ? -1 : 1;
    if (state.sort.named) return turn * htp.word(a, state.sort).localeCompare(htp.word(b, state.sort)) || a.id - b.id;
    if (state.sort.of) {
      const [one, other] = [htp.value(a, state.sort), htp.value(b, state.sort)];
      if (one === null || other === null) return (one === null) - (other === null);
      return turn * (one - other) || a.id - b.id;
    }
    return turn * String(state.sort.text(a)).localeCompare(String(state.sort.text(b)), "en", { numeric: true }) || a.id - b.id;
  }

  function arrange() {
    const rows = [];
    const wanted = state.query;
    function add(item, depth) {
      if (wanted && !wanted.seen.has(item)) return;
      rows.push({ item, depth });
      if (wanted ? wanted.open.has(item) || state.open.has(item) : state.open.has(item)) {
        for (const child of below(item)) add(child, depth + 1);
      }
    }
    if (state.flat) {
      const modules = htp.modules.filter((module) => !wanted || wanted.hits.has(module));
      for (const item of state.sort ? modules.sort(bySort) : modules) rows.push({ item, depth: 0 });
    } else {
      add(htp.root, 0);
    }
    state.rows = rows;
    nothing.hidden = !wanted || wanted.hits.size > 0;
    if (!nothing.hidden) state.rows = rows.splice(0, 0);
    // The line of the heads is counted, too.
    table.setAttribute("aria-rowcount", rows.length + 1);
    table.setAttribute("aria-colcount", columns().length + (hasClass() ? 3 : 2));
    body.style.height = `${rows.length * ROW}px`;
    draw(true);
  }

  // What the search field means, with what is above it and, to be unfolded, what is below.
  function parse(text) {
    let found;
    try {
      found = htp.search(text);
    } catch (error) {
      found = { hits: new Set(), words: [], problem: error.message };
    }
    if (!found) return null;
    const query = { ...found, seen: new Set([htp.root]), open: new Set() };
    function look(item) {
      let inside = false;
      for (const child of item.kind === "module" ? [...item.children, ...item.own] : []) inside = look(child) || inside;
      if (inside) query.open.add(item);
      if (inside || query.hits.has(item)) query.seen.add(item);
      return query.seen.has(item);
    }
    look(htp.root);
    for (const hit of query.hits) if (hit.kind === "module") walk(hit, (item) => query.seen.add(item));
    for (const node of OTHER.own) if (query.hits.has(node)) [node, OTHER].forEach((item) => query.seen.add(item) && query.open.add(OTHER));
    return query;
  }

  function walk(item, visit) {
    visit(item);
    if (item.kind === "module") [...item.children, ...item.own].forEach((child) => walk(child, visit));
  }

  // Open everything below that holds modules.
  function unfold(item) {
    const modules = inside(item);
    if (modules.length) state.open.add(item);
    modules.forEach(unfold);
  }

  function marked(text) {
    const words = state.query?.words.filter(Boolean) ?? [];
    const parts = [];
    let rest = text;
    while (rest) {
      const found = words.map((word) => [rest.toLowerCase().indexOf(word), word.length]).filter(([at]) => at >= 0).sort((a, b) => a[0] - b[0])[0];
      if (!found) break;
      parts.push(rest.slice(0, found[0]), htp.make("mark", { textContent: rest.slice(found[0], found[0] + found[1]) }));
      rest = rest.slice(found[0] + found[1]);
    }
    return [...parts, rest].filter((part) => part !== "");
  }

  const LETTER = 7.4; // pixels
  const BESIDE = 92; // pixels of a name: its margins, its arrow, and the button of alike siblings
  const step = () => (drawnFor === "phone" ? 10 : 16);

  // The names of alike siblings, in short where the column is narrow.
  function labelOf(item, depth) {
    const room = ((head.firstElementChild?.clientWidth || WIDTHS[drawnFor].name) - BESIDE - depth * step()) / LETTER;
    return item.short && item.label.length > room ? item.short : item.label;
  }

  function columns() {
    return htp.columns.filter((column) => shown.has(column.key));
  }

  function drawHead() {
    const kind = { title: "class", text: (m) => htp.simple(m.class) };
    const cells = [
      { title: "module", text: (m) => m.path },
      ...(hasClass() ? [kind] : []),
      ...columns(),
      { title: "fate", text: (m) => m.fate },
    ];
    const wide = WIDTHS[drawnFor];
    const widths = columns().map((column) => wide.number + (column === htp.time ? 50 : 0));
    const inner = `${wide.class ? `minmax(${wide.class}px, 1fr) ` : ""}${widths.map((width) => `${width}px `).join("")}`;
    const layout = `minmax(${wide.name}px, 2.6fr) ${inner}${wide.fate}px`;
    document.documentElement.style.setProperty("--layout", layout);
    // Every row is a grid of its own: all have the same width, whatever stands in them.
    document.documentElement.style.setProperty("--least", `${wide.name + wide.class + widths.reduce((sum, width) => sum + width, 0) + wide.fate}px`);
    head.setAttribute("aria-rowindex", 1);
    head.replaceChildren(...cells.map((cell, at) => {
      const sorted = state.sort?.title === cell.title;
      const arrow = sorted ? (state.descending ? " ↓" : " ↑") : "";
      const unit = `${cell.unit && cell.unit !== "B" ? ` ${cell.unit}` : ""}${cell === htp.time ? ", %" : ""}`;
      const element = htp.make("div", { role: "columnheader", "aria-colindex": at + 1, className: cell.of ? "number" : at ? "" : "name", textContent: cell.title + unit + arrow, title: "A click sorts, a second one the other way, a third one as in the model" });
      element.setAttribute("aria-sort", sorted ? (state.descending ? "descending" : "ascending") : "none");
      element.tabIndex = 0;
      element.onclick = () => sortBy(cell);
      element.onkeydown = (event) => {
        if (event.key !== "Enter" && event.key !== " ") return;
        event.preventDefault();
        event.stopPropagation();
        sortBy(cell);
        head.children[at].focus();
      };
      return element;
    }));
  }

  function sortBy(cell) {
    if (state.sort?.title !== cell.title) [state.sort, state.descending] = [cell, Boolean(cell.of)];
    else if (state.descending === Boolean(cell.of)) state.descending = !state.descending;
    else state.sort = null;
    drawHead();
    arrange();
  }

  function rowElement({ item, depth }, index) {
    const folds = !state.flat && below(item).length > 0;
    const open = folds && (state.open.has(item) || Boolean(state.query?.open.has(item)));
    const label = item.kind === "node"
      ? [htp.make("span", { className: "chip" }, ...marked(item.op)), htp.make("span", { className: "label path" }, ...marked(item.name))]
      : [htp.make("span", { className: "label path" }, ...marked(state.flat ? item.path || "(root)" : labelOf(item, depth)))];
    const name = htp.make("div", { className: "name", role: "gridcell", title: item.kind === "fold" ? item.label : item.path || item.name || "" },
      htp.make("span", { className: "guide", style: { width: `${depth * step()}px` } }),
      htp.make("span", { className: `arrow${open ? " open" : ""}`, textContent: folds ? "▶" : "" }),
      ...label, item.kind === "fold" && item.sets.length > 1 ? times(item) : null);
    const cells = [name];
    if (item.kind === "module" || item.kind === "fold") {
      if (hasClass()) cells.push(htp.make("div", { className: "class", role: "gridcell", title: item.class }, ...marked(htp.simple(item.class))));
      for (const column of columns()) cells.push(numberCell(item, column));
      cells.push(htp.make("div", { role: "gridcell" }, ...pills(item)));
    } else if (item.kind === "node") {
      const type = item.outputs[0]?.[1] ?? "";
      if (hasClass()) cells.push(htp.make("div", { className: "class", role: "gridcell", textContent: type, title: type }));
      for (const column of columns()) cells.push(numberCell(item, column));
      cells.push(htp.make("div", { role: "gridcell" }, item.owners.length > 1 ? pill(`${item.owners.length} owners`, htp.REASONS[item.reason || "shared"]?.[0] ?? "", "accent") : null));
    } else {
      cells.push(htp.make("div", { className: "class", role: "gridcell", textContent: `${item.own.length} nodes` }));
    }
    const quiet = item.nodes === 0 ? " quiet" : "";
    const row = htp.make("div", { className: `row ${item.kind}${quiet}${item === htp.selected ? " selected" : ""}`, role: "row", id: `row-${index}` }, ...cells);
    cells.forEach((cell, at) => cell.setAttribute("aria-colindex", at + 1));
    row.setAttribute("aria-level", depth + 1);
    row.setAttribute("aria-rowindex", index + 2);
    if (folds) row.setAttribute("aria-expanded", open);
    row.setAttribute("aria-selected", item === htp.selected);
    row.style.top = `${index * ROW}px`;
    row.onclick = (event) => (event.target.classList.contains("arrow") && folds ? toggle(item) : htp.select(item, "table"));
    row.ondblclick = () => folds && toggle(item);
    return row;
  }

  // How many are drawn as one; takes them apart.
  function times(fold) {
    const apart = state.apart.has(fold);
    const button = htp.make("button", { className: "times", textContent: `× ${fold.sets.length}`, tabIndex: -1, title: apart ? "Show what they have in common (x)" : "Show each of them (x)", "aria-pressed": apart });
    button.onclick = (event) => {
      event.stopPropagation();
      htp.select(fold, "table");
      takeApart(fold);
    };
    button.ondblclick = (event) => event.stopPropagation();
    return button;
  }

  function takeApart(fold, apart = !state.apart.has(fold)) {
    if (apart) state.apart.add(fold);
    else state.apart.delete(fold);
    state.open.add(fold);
    arrange();
  }

  function numberCell(item, column) {
    if (column.named) return htp.make("div", { className: "number", role: "gridcell", textContent: item.kind === "node" ? "" : htp.word(item, column) });
    const value = htp.value(item, column);
    const words = (item.kind === "node" ? "" : column.words?.[item.id]) ?? "";
    const parted = item.kind === "node" && value !== null && !column.isSaid(item);
    const said = [value === null ? "" : htp.exact(value, column.unit), spread(item, column), words, parted ? "an equal part of what its module has left" : ""];
    const cell = htp.make("div", { className: "number", role: "gridcell", title: said.filter(Boolean).join("\n") });
    if (value === null) return cell;
    const bad = /^differs/.test(words) || Number.isNaN(value);
    if (column.most && Number.isFinite(value) && value !== 0) {
      const width = `${Math.max(1.5, 88 * Math.min(1, Math.abs(value) / column.most))}%`;
      cell.append(htp.make("i", { className: `fill${bad ? " bad" : ""}`, style: { width, background: column === htp.time ? htp.colours.heated(Math.sqrt(htp.part(value, column))) : "" } }));
    }
    cell.append(htp.make("span", { className: value === 0 ? "empty" : "", textContent: (parted ? "≈ " : "") + htp.compact(value, column.unit) }));
    if (column === htp.time) cell.append(" ", htp.make("span", { className: "share", textContent: htp.share(value, column) }));
    return cell;
  }

  function spread(item, column) {
    if (item.kind !== "fold") return "";
    const values = item.members.map(column.of).filter(Number.isFinite);
    const [least, most] = [Math.min(...values), Math.max(...values)];
    if (!(least < most)) return "";
    return `${column.additive ? "the mean" : "the largest"} of ${values.length}: ${htp.compact(least, column.unit)} to ${htp.compact(most, column.unit)}`;
  }

  function pill(text, title, tone = "") {
    return htp.make("span", { className: `pill ${tone}`, textContent: text, title });
  }

  function pills(module) {
    const { meaning, tone, remark } = htp.FATES[module.fate];
    const said = remark ? [pill(remark, meaning, tone)] : [];
    const tied = Object.entries(module.tied ?? {});
    if (tied.length) said.push(pill("tied", tied.map(([name, first]) => `${name} is ${first}`).join("\n"), "accent"));
    if (module.calls > 1) said.push(pill(`${module.calls} calls`, "its forward ran several times"));
    return said;
  }

  let first = -1;
  let last = -1;
  function draw(anew = false) {
    const from = Math.max(0, Math.floor(table.scrollTop / ROW) - 8);
    const to = Math.min(state.rows.length, Math.ceil((table.scrollTop + table.clientHeight) / ROW) + 8);
    if (!anew && from === first && to === last) return;
    [first, last] = [from, to];
    body.replaceChildren(...state.rows.slice(from, to).map((row, k) => rowElement(row, from + k)));
    const at = state.rows.findIndex((row) => row.item === htp.selected);
    if (at >= from && at < to) table.setAttribute("aria-activedescendant", `row-${at}`);
    else table.removeAttribute("aria-activedescendant");
  }

  function toggle(item, open = !(state.open.has(item) || state.query?.open.has(item))) {
    if (open) state.open.add(item);
    else {
      state.open.delete(item);
      state.query?.open.delete(item);
    }
    arrange();
  }

  function scrollTo(index) {
    const top = index * ROW;
    if (top < table.scrollTop) table.scrollTop = top;
    else if (top + 2 * ROW > table.scrollTop + table.clientHeight) table.scrollTop = top + 2 * ROW - table.clientHeight;
  }

  // A module that is drawn as one with others, on its own.
  function apart(module) {
    if (!state.repeats || !module.run) return;
    state.open.add(module.run.fold);
    state.apart.add(module.run.fold);
  }

  // What is selected elsewhere is shown, whatever was searched for, or listed.
  function clear(item) {
    if (state.query && !state.query.seen.has(item)) {
      search.value = "";
      look();
    }
    if (state.flat && item.kind !== "module") document.getElementById("flat").click();
  }

  // Show an item wherever it is: unfold what is above it.
  function reveal(item) {
    clear(item);
    let above = item.kind === "node" ? htp.byPath.get(item.owners[0]) ?? null : item.above;
    if (item.kind === "node" && !above) above = OTHER.own.includes(item) ? OTHER : htp.root;
    if (item.kind === "module") apart(item);
    while (above && above.kind !== "loose") {
      if (above.kind === "module") apart(above);
      state.open.add(above);
      above = above.above;
    }
    if (OTHER.own.includes(item)) state.open.add(htp.root).add(OTHER);
    arrange();
    const at = state.rows.findIndex((row) => row.item === item);
    if (at >= 0) scrollTo(at);
  }

  function move(to) {
    const at = Math.max(0, Math.min(state.rows.length - 1, to));
    if (!state.rows.length) return;
    htp.select(state.rows[at].item, "table");
    scrollTo(at);
    draw(true);
  }

  table.addEventListener("keydown", (event) => {
    const at = state.rows.findIndex((row) => row.item === htp.selected);
    const row = state.rows[at];
    const page = Math.max(1, Math.floor(table.clientHeight / ROW) - 2);
    const open = row && (state.open.has(row.item) || state.query?.open.has(row.item));
    const keys = {
      ArrowDown: () => move(at + 1),
      ArrowUp: () => move(at - 1),
      PageDown: () => move(at + page),
      PageUp: () => move(at - page),
      Home: () => move(0),
      End: () => move(state.rows.length - 1),
      Enter: () => row && toggle(row.item),
      " ": () => row && toggle(row.item),
      ArrowRight: () => row && (!open && below(row.item).length ? toggle(row.item, true) : move(at + 1)),
      ArrowLeft: () => {
        if (!row) return;
        if (open) toggle(row.item, false);
        else for (let k = at - 1; k >= 0; k--) if (state.rows[k].depth < row.depth) return move(k);
      },
      "*": () => row && (walk(row.item, (item) => item.kind === "module" && state.open.add(item)), unfold(row.item), arrange()),
      x: () => row?.item.kind === "fold" && row.item.sets.length > 1 && takeApart(row.item),
    };
    if (!keys[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    keys[event.key]();
  });

  function look() {
    state.query = parse(search.value);
    const hits = state.query?.hits.size ?? 0;
    const found = [...(state.query?.hits ?? [])].filter((item) => item.kind === "module").slice(0, MOST_COPIED + 1);
    document.getElementById("hits").replaceChildren(state.query ? `${hits.toLocaleString("en")} found ` : "",
      ...(found.length && found.length <= MOST_COPIED ? [htp.copier(htp.selector(found), "Copy selector")] : []));
    document.getElementById("sought").textContent = search.value.trim();
    document.getElementById("problem").textContent = state.query?.problem ? `It cannot be read: ${state.query.problem}. ` : "";
    table.scrollTop = 0;
    arrange();
  }
  search.addEventListener("input", look);
  document.getElementById("clear").onclick = () => {
    search.value = "";
    search.dispatchEvent(new Event("input"));
    search.focus();
  };
  search.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" && event.key !== "ArrowDown") return;
    event.preventDefault();
    table.focus();
    const hit = state.rows.findIndex((row) => state.query?.hits.has(row.item));
    if (hit >= 0) move(hit);
  });

  document.getElementById("fold").onclick = () => {
    state.open = new Set([htp.root]);
    arrange();
  };
  document.getElementById("unfold").onclick = () => {
    unfold(htp.root);
    arrange();
  };
  const repeats = document.getElementById("repeats");
  repeats.parentElement.hidden = !state.repeats;
  repeats.checked = state.repeats;
  repeats.onchange = () => {
    state.repeats = repeats.checked;
    const item = htp.selected?.kind === "fold" ? htp.selected.members[0] : null;
    arrange();
    if (item) htp.select(item);
  };
  document.getElementById("flat").onchange = (event) => {
    state.flat = event.target.checked;
    arrange();
  };
  document.querySelector("#columns > div").append(...htp.columns.map((column) => {
    const box = htp.make("input", { type: "checkbox", checked: shown.has(column.key) });
    box.onchange = () => {
      if (box.checked) shown.add(column.key);
      else shown.delete(column.key);
      drawHead();
      draw(true);
    };
    return htp.make("label", {}, box, column.title);
  }));
  table.addEventListener("scroll", () => draw());
  new ResizeObserver(() => {
    if (room() === drawnFor || !table.clientWidth) return draw(true);
    drawnFor = room();
    drawHead();
    arrange();
  }).observe(table);

  htp.listeners.push((item, by) => (by === "table" ? draw(true) : item && reveal(item)));
  // The row that draws several modules as one, by the first of them; rows inside of such rows, too.
  function foldOf(module) {
    const find = (fold) => (fold.members[0] === module ? fold : fold.children.map(find).find(Boolean));
    for (let top = module; top; top = top.above) {
      const found = top.run ? find(top.run.fold) : null;
      if (found) return found;
    }
    return null;
  }
  // As long as the table is not shown, it cannot be scrolled to what is selected.
  function open() {
    const at = state.rows.findIndex((row) => row.item === htp.selected);
    if (at >= 0) scrollTo(at);
  }
  htp.table = { state, reveal, toggle, look, foldOf, open };

  // At first, as many levels as fit on a screen.
  state.open.add(htp.root);
  let level = inside(htp.root);
  let count = 1 + level.length;
  while (level.length) {
    const next = level.flatMap(inside);
    count += next.length;
    if (count > 32 || !next.length) break;
    level.filter((item) => inside(item).length).forEach((item) => state.open.add(item));
    level = next;
  }
  drawHead();
  arrange();
})();
