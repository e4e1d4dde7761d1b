"use strict";
// The graph: modules as boxes that open, nodes as cards with their numbers, and a table of both. Only what is in sight is
// in the page, so that its size does not matter.
(function () {
  const ROW = 28;
  const AT_FIRST = 40; // boxes that are opened to at most, at first, without inputs and outputs
  const AT_MOST = 120; // the same, down to modules that are drawn as one
  const FACTS = ["parameters", "flops", "activation_bytes"];
  const SHORT = { parameters: " par", flops: " FLOPs" };
  const byId = (id) => document.getElementById(id);
  const [graph, canvas, table, rows] = ["graph-drawing", "graph-canvas", "graph-table", "graph-rows"].map(byId);
  const [merge, listed, colour] = [byId("graph-merge"), byId("graph-list"), byId("graph-colour")];
  // Each node lies in its owner, or in the deepest module above all of its owners.
  function homeOf(node) {
    const [first, ...others] = node.owners.map((path) => htp.byPath.get(path) ?? htp.root);
    let above = first ?? htp.root;
    for (let other of others) {
      while (above !== other) above.depth >= other.depth ? (above = above.above) : (other = other.above);
    }
    return above;
  }
  // Nodes that compute nothing: no parameters, and costs that are known to be zero.
  const work = ["flops", "other_flops"].map((key) => htp.columns.find((column) => column.key === key));
  const isTrivial = (node) => !node.parameters && work.every((column) => column?.isSaid(node) && column.ofNode(node) === 0);
  const { inputs, outputs } = htp.data;
  const layers = htp.layersOf({ nodes: htp.nodes, modules: htp.modules, root: htp.root, inputs, outputs, homeOf, isTrivial });
  const { trivial, consumers, levels, laidOut } = layers;
  const column = (key) => htp.columns.find((each) => each.key === key);
  const facts = FACTS.map(column).filter(Boolean);
  const columns = [...new Set([...(htp.time ? [htp.time] : []), ...facts, ...htp.columns.filter((each) => each.main && each.key !== "nodes")])];
  const state = { open: new Set([htp.root]), apart: new Set(), groups: new Map(), found: null, base: null, drawn: null, order: [], deepest: [], most: 0 };

  // --- what is drawn: nodes, or a node with those that are merged into it

  function regroup() {
    const on = merge.checked;
    state.base ??= on ? layers.merged() : null;
    const whole = new Map();
    state.headOf = htp.nodes.map((node) => {
      const head = on ? state.base[node.id] : node;
      if (head !== node) whole.set(head, [...(whole.get(head) ?? [head]), node]);
      return state.apart.has(head) ? node : head;
    });
    state.whole = whole; // every group, those that are taken apart too
    state.groups = new Map([...whole].filter(([head]) => !state.apart.has(head)));
    state.found = levels(state.headOf);
    const count = [...state.groups.values()].reduce((sum, group) => sum + group.length - 1, 0);
    byId("graph-merged").textContent = on ? `${count.toLocaleString("en")} merged` : "";
  }
  const membersOf = (item) => state.groups.get(item) ?? [item];

  // The value of a card: of merged nodes, their sum, or the largest of what does not add up.
  function valueOf(item, each) {
    const { ofNode, additive } = each;
    if (item.kind === "end") return null;
    if (item.kind !== "node") return htp.value(item, each);
    const values = membersOf(item).map((node) => ofNode?.(node) ?? null).filter((value) => value !== null);
    if (!values.length) return null;
    return additive ? values.reduce((sum, value) => sum + value, 0) : values.some(Number.isNaN) ? NaN : Math.max(...values);
  }
  const isSaid = (item, each) => item.kind !== "node" || membersOf(item).every((node) => each.ofNode?.(node) == null || each.isSaid(node));
  function text(item, each, bare = false) {
    const value = valueOf(item, each);
    if (each.named && item.kind !== "end") return htp.word(item, each);
    return value === null ? "" : `${isSaid(item, each) ? "" : "≈ "}${bare ? htp.compact(value, each.unit) : htp.withUnit(value, each)}${bare ? "" : ` ${htp.share(value, each)}`.trimEnd()}`;
  }
  const labelOf = (item) => (item.kind === "node" ? item.name : item.label);
  const titleOf = (item) => (item.kind === "fold" ? `${item.path} … ${item.members.at(-1).path}` : item.path ?? item.name ?? "");
  const folds = (item) => item.kind === "fold" || (item.kind === "module" && state.found.get(item).items.size > 0);
  const outputOf = (item) => (item.kind === "end" ? item.type : item.kind === "node" ? item.outputs[0]?.[1] ?? "" : "");
  // What stands for an item in the drawing: itself, the node that it is merged into, or the closed module around it.
  function boxFor(item) {
    let at = item.kind === "node" ? state.headOf[item.id] : item;
    while (at && !state.drawn.boxOf.has(at)) at = at.kind === "node" ? layers.home.get(at) : at.above;
    return state.drawn.boxOf.get(at);
  }
  const selectedBox = () => {
    const item = htp.selected?.kind === "fold" ? htp.selected.members[0] : htp.selected;
    return item && item.kind !== "loose" && state.drawn ? boxFor(item) : undefined;
  };

  function arrange() {
    if (!state.found) regroup();
    state.drawn = laidOut(state.found, state.open, state.apart);
    state.order = state.drawn.boxes;
    state.order.forEach((box, k) => (box.row = k));
    // How far down the rows up to each one reach: rows and heights grow together.
    let deepest = 0;
    state.deepest = state.order.map((box) => (deepest = Math.max(deepest, box.top)));
    drawing.place(state.drawn);
    rows.style.height = `${state.order.length * ROW}px`;
    table.setAttribute("aria-rowcount", state.order.length + 1);
    const shown = column(colour.value);
    const finite = shown ? state.order.filter((box) => !box.lines).map((box) => valueOf(box.item, shown)).filter(Number.isFinite) : [];
    state.most = finite.reduce((most, value) => Math.max(most, Math.abs(value)), 0);
    drawOverview();
    draw();
  }

  function fill(item) {
    const shown = column(colour.value);
    if (shown?.named) return item.kind === "end" ? "" : htp.colours.ofWord(shown, item);
    if (shown) return htp.colours.ofValue(shown, valueOf(item, shown), state.most);
    return item.kind === "module" || item.kind === "fold" ? htp.colours.ofClass(item) : "";
  }

  // --- the graph

  // Letters of a name that fit on a card beside what stands before it.
  const LETTER = 7.3; // pixels, of names; those of operators are narrower
  function roomFor(item) {
    const before = item.kind === "node" ? 7 * item.op.length + 18 : folds(item) ? 16 : 0;
    const after = apartButton(item) ? 44 : 0;
    return Math.max(6, Math.floor((layers.CARD.width - 18 - before - after) / LETTER));
  }

  function card(box) {
    const { item } = box;
    const open = Boolean(box.lines);
    const room = roomFor(item);
    const name = item.short && labelOf(item).length > room ? item.short : labelOf(item);
    const label = open ? labelOf(item) : htp.cut(name, room);
    const shown = column(colour.value);
    const numbers = [...(shown && !facts.includes(shown) ? [shown] : []), ...facts].filter((each) => (each.named ? text(item, each) : valueOf(item, each))).map((each) => [each, text(item, each) + (SHORT[each.key] ?? "")]);
    const head = htp.make("div", { className: "head" },
      folds(item) ? htp.make("span", { className: `arrow${open ? " open" : ""}`, textContent: "▶" }) : null,
      item.kind === "node" ? htp.make("span", { className: "chip", textContent: item.op }) : null,
      htp.make("span", { className: "label path", textContent: label }),
      item.class ? htp.make("span", { className: "kind", textContent: `${htp.simple(item.class)}${open && item.kind === "fold" ? `, inside: ${item.members[0].label}` : ""}` }) : null,
      apartButton(item));
    const said = item.kind === "end" ? [htp.make("span", { textContent: item.type })] : numbers.map(([each, value]) => {
      const number = htp.make("span", { textContent: value, title: `${each.title} ${htp.exact(valueOf(item, each), each.unit)}` });
      number.dataset.key = each.key;
      return number;
    });
    const element = htp.make("div", { className: `card ${item.kind}${open ? " open" : ""}${box === selectedBox() ? " selected" : ""}${item === state.marked ? " found" : ""}`, title: titleOf(item) },
      htp.make("div", { className: `face${!open && fill(item) ? " filled" : ""}`, style: { background: open ? "" : fill(item) } }, head, htp.make("div", { className: "numbers" }, ...said)));
    Object.assign(element.style, { left: `${box.left}px`, top: `${box.top}px`, width: `${box.width}px`, height: `${box.height}px` });
    if (item.kind === "end") return element;
    element.onclick = (event) => {
      event.stopPropagation();
      if (event.target.classList.contains("arrow")) toggle(item);
      else choose(box);
    };
    element.ondblclick = (event) => {
      event.stopPropagation();
      if (!event.target.classList.contains("arrow") && folds(item)) toggle(item);
    };
    return element;
  }

  // What is drawn as one with others: how many, and the way to see each.
  function apartButton(item) {
    const fold = foldOf(item);
    if (fold) return timesButton(fold, `× ${fold.members.length}`, state.apart.has(fold) ? "Draw alike modules once (x)" : "Show each of them (x)");
    const group = item.kind === "node" && state.whole.get(item);
    if (!group) return null;
    const apart = state.apart.has(item);
    const others = new Map();
    for (const { op } of group.slice(1)) others.set(op, (others.get(op) ?? 0) + 1);
    const said = [...others].map(([op, count]) => (count > 1 ? `${op} × ${count}` : op)).join(", ");
    return timesButton(item, `${apart ? "−" : "+"}${group.length - 1}`, `${apart ? "Merge" : "Show"} ${said} (m)`);
  }
  // The fold that an item is, or the one that it is the first of, while that is taken apart.
  const foldOf = (item) => (item.kind === "fold" ? item : item.run?.fold.members[0] === item && state.apart.has(item.run.fold) ? item.run.fold : null);
  function timesButton(item, textContent, title) {
    const button = htp.make("button", { className: "times", textContent, tabIndex: -1, title, "aria-pressed": state.apart.has(item) });
    button.onclick = (event) => {
      event.stopPropagation();
      takeApart(item);
    };
    button.ondblclick = (event) => event.stopPropagation();
    return button;
  }

  // What the selected item reads and what reads it, in whatever modules these are.
  function neighbours(box) {
    if (!box) return [];
    if (state.lit?.box !== box) state.lit = { box, pairs: pairsOf(box) };
    return state.lit.pairs;
  }
  function pairsOf(box) {
    const inside = (node) => {
      for (let at = boxFor(node); at; at = at.around) if (at === box) return true;
      return false;
    };
    const nodes = box.item.kind === "node" ? membersOf(box.item) : box.item === htp.root || box.item.kind === "end" ? [] : htp.nodes.filter(inside);
    const pairs = new Map();
    const pair = (from, to) => from && to && from !== to && pairs.size < 200 && pairs.set(`${from.row} ${to.row}`, [from, to]);
    for (const node of nodes) {
      for (const [, from] of node.inputs) if (from !== null && !inside(htp.nodes[from])) pair(boxFor(htp.nodes[from]), box);
      for (const reader of consumers[node.id]) if (!inside(reader)) pair(box, boxFor(reader));
    }
    return [...pairs.values()];
  }

  const drawing = htp.drawingOf(graph, canvas, { layers, card, changed: () => draw() });
  function draw() {
    if (!state.drawn || !graph.clientHeight) return;
    drawing.draw(neighbours(selectedBox()));
    drawRows();
    drawSight();
  }

  // --- the table

  function drawHead() {
    byId("graph-head").replaceChildren(...["module or node", ...columns.map((each) => each.title + (each.unit && each.unit !== "B" ? ` ${each.unit}` : "")), "output"]
      .map((title, k, { length }) => htp.make("div", { role: "columnheader", "aria-colindex": k + 1, className: !k ? "name" : k < length - 1 ? "number" : "", textContent: title })));
    table.setAttribute("aria-colcount", columns.length + 2);
    table.style.setProperty("--layout", `minmax(200px, 2fr) ${"100px ".repeat(columns.length)} minmax(120px, 1fr)`);
    table.style.setProperty("--least", `${320 + 100 * columns.length}px`);
  }

  function rowOf(box, index) {
    const { item } = box;
    const open = Boolean(box.lines);
    const cells = [
      htp.make("div", { className: "name", role: "gridcell" },
        htp.make("span", { className: "guide", style: { width: `${box.depth * 12}px` } }),
        htp.make("span", { className: `arrow${open ? " open" : ""}`, textContent: folds(item) ? "▶" : "" }),
        item.kind === "node" ? htp.make("span", { className: "chip", textContent: item.op }) : null,
        htp.make("span", { className: "label path", textContent: labelOf(item) }), apartButton(item)),
      ...columns.map((each) => htp.make("div", { className: "number", role: "gridcell", textContent: text(item, each, each.unit === "ms"), title: htp.exact(valueOf(item, each), each.unit) })),
      htp.make("div", { className: "class", role: "gridcell", textContent: outputOf(item), title: outputOf(item) }),
    ];
    const row = htp.make("div", { className: `row ${item.kind}${box === selectedBox() ? " selected" : ""}`, role: "row", id: `graph-row-${index}`, style: { top: `${index * ROW}px` } }, ...cells);
    cells.forEach((cell, at) => cell.setAttribute("aria-colindex", at + 1));
    row.setAttribute("aria-level", box.depth + 1);
    row.setAttribute("aria-rowindex", index + 2);
    row.setAttribute("aria-selected", box === selectedBox());
    if (folds(item)) row.setAttribute("aria-expanded", open);
    if (item.kind === "end") return row;
    row.onclick = (event) => (event.target.classList.contains("arrow") && folds(item) ? toggle(item) : choose(box));
    row.ondblclick = (event) => !event.target.classList.contains("arrow") && folds(item) && toggle(item);
    return row;
  }

  function drawRows() {
    if (!listed.checked) return;
    const from = Math.max(0, Math.floor(table.scrollTop / ROW) - 6);
    const to = Math.min(state.order.length, Math.ceil((table.scrollTop + table.clientHeight) / ROW) + 6);
    rows.replaceChildren(...state.order.slice(from, to).map((box, k) => rowOf(box, from + k)));
    const at = selectedBox()?.row ?? -1;
    if (at >= from && at < to) table.setAttribute("aria-activedescendant", `graph-row-${at}`);
    else table.removeAttribute("aria-activedescendant");
  }

  const { scrollTo } = htp.together(graph, table, {
    tops: () => state.deepest, height: () => state.drawn?.root.height ?? 0, isOn: () => listed.checked, draw, drawRows,
  });

  // Bring a box into sight in both, where it is not.
  function reach(box) {
    drawing.reach(box, scrollTo);
    const y = box.row * ROW;
    if (y < table.scrollTop || y + 2 * ROW > table.scrollTop + table.clientHeight) scrollTo(table, y - (table.clientHeight - 2 * ROW) / 2);
  }

  const [drawOverview, drawSight] = htp.overview(byId("graph-overview"), graph, { drawn: () => state.drawn, zoom: () => drawing.scale, fill });

  // --- what users do

  function choose(box) {
    if (!box || box.item.kind === "end") return;
    htp.select(box.item, "graph");
    say(box);
    reach(box);
    draw();
  }
  function say(box) {
    const numbers = facts.map((each) => [each.title, text(box.item, each)]).filter(([, value]) => value).map((pair) => pair.join(" "));
    byId("graph-said").textContent = [box.item.kind === "node" ? `${box.item.op} ${box.item.name}` : titleOf(box.item) || "the whole model", ...numbers].join(", ");
  }
  // An item keeps its height on the screen while what is above it changes.
  function kept(item, change) {
    const before = state.drawn?.boxOf.get(item);
    const offset = before ? before.top * drawing.scale - graph.scrollTop : 0;
    change();
    arrange();
    const after = state.drawn.boxOf.get(item) ?? selectedBox();
    if (before && after) graph.scrollTop = after.top * drawing.scale - offset;
    draw();
  }
  function toggle(item, open = !state.open.has(item)) {
    kept(item, () => (open ? state.open.add(item) : state.open.delete(item)));
  }
  // A node and those that are merged into it, or modules that are drawn as one.
  function takeApart(item, apart = !state.apart.has(item)) {
    const shown = item.kind === "fold" && htp.selected && (apart ? htp.selected === item : item.members.includes(htp.selected));
    kept(item.members?.[0] ?? item, () => {
      state.apart[apart ? "add" : "delete"](item);
      if (item.kind === "node") regroup();
      else state.found.get(item.members[0].above).drawn = null;
    });
    if (shown) choose(boxFor(item.members[0]));
  }
  const above = (item) => (item.kind === "node" ? layers.home.get(item) : item.above);
  function reveal(item, alone = true) {
    if (!state.drawn) return;
    for (let at = alone && item.kind === "module" ? item : above(item); at; at = at.above) {
      if (at !== item) state.open.add(at).add(at.run?.fold ?? at);
      if (!at.run || !alone) continue;
      state.apart.add(at.run.fold);
      state.found.get(at.above).drawn = null;
    }
    arrange();
    const box = boxFor(item);
    if (box) reach(box);
    draw();
  }

  // The zoom changes around what is selected, if that is in sight.
  function zoomBy(factor) {
    const box = selectedBox();
    const element = canvas.querySelector(".card.selected");
    const [card, view] = [element?.getBoundingClientRect(), graph.getBoundingClientRect()];
    const isSeen = box && !box.lines && card && card.bottom > view.top && card.top < view.bottom && card.right > view.left && card.left < view.right;
    drawing.zoom(drawing.scale * factor, ...(isSeen ? [card.left + card.width / 2, card.top + card.height / 2] : []));
  }
  // The whole graph, or its own size.
  function fit() {
    const before = drawing.scale;
    drawing.fit();
    if (Math.abs(drawing.scale - before) > 0.001) return;
    drawing.zoom(1);
    const box = selectedBox();
    if (box) reach(box);
  }

  // --- search

  const [sought, found] = [byId("graph-search"), byId("graph-found")];
  function hits() {
    const text = sought.value.trim().toLowerCase();
    if (!text) return [];
    const ends = [...layers.ends.inputs, ...layers.ends.outputs].filter(({ members }) => members.some(([name]) => name.toLowerCase().includes(text)));
    try {
      return [...ends, ...(htp.search(sought.value)?.hits ?? [])];
    } catch {
      return ends; // the word is no selector yet
    }
  }
  let place = -1;
  function go(step) {
    const list = hits();
    place = list.length ? (place + step + list.length) % list.length : -1;
    found.textContent = sought.value.trim() ? (list.length ? `${place + 1} of ${list.length.toLocaleString("en")}` : "not found") : "";
    const item = list[place];
    state.marked = item?.kind === "end" ? item : null;
    if (state.marked) {
      state.open.add(htp.root);
      arrange();
      reach(boxFor(item));
    } else if (item) {
      htp.select(item);
    }
    draw();
  }
  sought.oninput = () => {
    place = -1;
    const count = hits().length;
    found.textContent = sought.value.trim() ? `${count.toLocaleString("en")} found` : "";
  };
  sought.onkeydown = (event) => {
    if (event.key === "Enter") go(event.shiftKey ? -1 : 1);
    if (event.key === "Escape") {
      sought.value = "";
      sought.oninput();
      graph.focus();
    }
  };

  function onKey(event) {
    const box = selectedBox();
    const at = box?.row ?? -1;
    const page = Math.max(1, Math.floor(table.clientHeight / ROW) - 2);
    const go = (to, step) => {
      let row = Math.max(0, Math.min(state.order.length - 1, to));
      while (state.order[row]?.item.kind === "end") row += step;
      choose(state.order[row]);
    };
    const keys = {
      ArrowDown: () => go(at + 1, 1),
      ArrowUp: () => go(at - 1, -1),
      PageDown: () => go(at + page, -1),
      PageUp: () => go(at - page, 1),
      Home: () => go(0, 1),
      End: () => go(state.order.length - 1, -1),
      ArrowRight: () => (box && folds(box.item) && !box.lines ? toggle(box.item, true) : go(at + 1, 1)),
      ArrowLeft: () => (box?.lines && box.around ? toggle(box.item, false) : choose(box?.around)),
      Enter: () => box && folds(box.item) && toggle(box.item),
      " ": () => box && folds(box.item) && toggle(box.item),
      x: () => {
        const fold = box && (box.item.kind === "fold" ? box.item : box.item.run?.fold);
        if (fold) takeApart(fold);
      },
      "+": () => zoomBy(1.25),
      "=": () => zoomBy(1.25),
      "-": () => zoomBy(0.8),
      0: fit,
      m: () => {
        const node = htp.selected?.kind === "node" ? state.base?.[htp.selected.id] : null;
        if (node && state.whole.has(node)) takeApart(node);
      },
    };
    if (!keys[event.key] || event.ctrlKey || event.metaKey || event.altKey || !state.drawn) return;
    event.preventDefault();
    keys[event.key]();
  }
  graph.addEventListener("keydown", onKey);
  table.addEventListener("keydown", onKey);

  merge.disabled = !trivial.includes(true);
  merge.parentElement.title += merge.disabled ? "; there are none" : "";
  merge.onchange = () => kept(selectedBox()?.item, () => ((state.apart = new Set([...state.apart].filter((item) => item.kind === "fold"))), regroup()));
  listed.checked = false;
  listed.onchange = () => {
    table.hidden = !listed.checked;
    draw();
  };
  table.hidden = !listed.checked;
  colour.append(...htp.colours.options());
  if (htp.time) colour.value = htp.time.key;
  colour.onchange = arrange;
  byId("graph-fold").onclick = () => kept(selectedBox()?.item, () => (state.open = new Set([htp.root])));
  byId("graph-unfold").onclick = () => kept(selectedBox()?.item, () => (state.open = new Set([...htp.modules, ...htp.modules.map((module) => module.run?.fold)])));
  byId("graph-in").onclick = () => zoomBy(1.25);
  byId("graph-out").onclick = () => zoomBy(0.8);
  byId("graph-fit").onclick = fit;
  byId("graph-png").onclick = () => htp.picture.savePng(graph, htp.data.name);
  byId("graph-svg").onclick = () => htp.picture.saveSvg(graph, htp.data.name);
  drawHead();

  // At first, what holds alike modules is open, and these are drawn once each; without any, as much as fits on a screen.
  function first() {
    regroup();
    const holding = new Set();
    for (const module of htp.modules) for (let at = module.run && module.above; at; at = at.above) holding.add(at);
    let level = [htp.root];
    let count = 1;
    while (level.length) {
      const inside = level.flatMap((module) => [...state.found.get(module).items]).filter((item) => item.kind !== "end" && (!item.run || item.run.fold.members[0] === item));
      count += inside.length;
      if (count > (level.some((module) => holding.has(module)) ? AT_MOST : AT_FIRST) && level[0] !== htp.root) break;
      level.forEach((module) => state.open.add(module));
      level = inside.filter((item) => item.kind === "module" && !item.run && (!holding.size || holding.has(item)));
    }
    arrange();
    graph.scrollLeft = (canvas.offsetWidth + 24 - graph.clientWidth) / 2;
    show(htp.selected);
  }
  function show(item) {
    if (!item || item === htp.root || item.kind === "loose") return;
    reveal(item.kind === "fold" ? item.members[0] : item, item.kind !== "fold");
  }
  htp.listeners.push((item, by) => by !== "graph" && state.drawn && show(item));
  // What is selected and was in sight stays there when the window changes.
  let size = [0, 0];
  new ResizeObserver(() => {
    if (!state.drawn || !graph.clientHeight) return;
    const box = selectedBox();
    const [width, height] = size;
    size = [graph.clientWidth, graph.clientHeight];
    const [x, y] = box ? [box.left * drawing.scale + canvas.offsetLeft, box.top * drawing.scale + canvas.offsetTop] : [0, 0];
    const wasSeen = box && !box.lines && y >= graph.scrollTop && y <= graph.scrollTop + height && x >= graph.scrollLeft && x <= graph.scrollLeft + width;
    if (wasSeen) reach(box);
    drawOverview();
    draw();
  }).observe(graph);
  htp.graph = {
    state,
    open: () => (state.drawn ? (drawOverview(), draw()) : first()),
    restyle: () => state.drawn && (drawOverview(), draw()),
  };
})();
