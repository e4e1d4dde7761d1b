"use strict";
// The graphs of a module in two files, side by side. What is equal in both is folded: an equal module stays closed, and
// equal nodes that follow each other are one card.
(function () {
  const AT_FIRST = 60; // boxes that are opened to at most, in each file
  const byId = (id) => document.getElementById(id);

  // The graph of a file, as `layersOf` takes it; `rows` are those of the table.
  function modelOf(file, rows) {
    const { graph, words } = file;
    const modules = new Map();
    for (const row of rows) {
      if (!file.has(row)) continue;
      let above = row.above;
      while (above && !modules.has(above)) above = above.above;
      const module = { kind: "module", row, path: file.pathOf(row), class: file.classOf(row), above: modules.get(above) ?? null, children: [] };
      module.label = module.above?.path ? module.path.slice(module.above.path.length + 1) : module.path || "(root)";
      module.depth = module.above ? module.above.depth + 1 : 0;
      module.above?.children.push(module);
      modules.set(row, module);
    }
    const nodes = graph.op.map((op, id) => ({
      kind: "node", id, op: words[op], name: graph.name[id], type: words[graph.type[id]], step: graph.step[id],
      module: modules.get(rows[graph.row[id]]), outputs: [],
      inputs: graph.from[id].map((from) => (from < 0 ? [graph.inputs[-1 - from][0], null] : ["", from])),
    }));
    for (const [name, id] of Object.entries(graph.outputs)) nodes[id].outputs.push([name, nodes[id].type]);
    const outputs = Object.entries(graph.outputs).map(([name, id]) => [name, nodes[id].type]);
    const layers = htp.layersOf({ nodes, modules: [...modules.values()], root: modules.get(rows[0]), inputs: graph.inputs, outputs, homeOf: (node) => node.module });
    return { file, modules, nodes, layers };
  }

  // The counterpart of each node in the other file, of the same module: a node that reads the same, else one of the same
  // operator with its name, else the next one of its operator. Only the first kind is `equal`.
  const KINDS = [({ step }) => step, ({ op, name }) => (name ? `${op} ${name}` : null), ({ op }) => op];
  function paired(one, other) {
    const twins = new Map();
    const [equal, taken] = [new Set(), new Set()];
    KINDS.forEach((kind, k) => {
      const waiting = new Map();
      const keyOf = (node) => (kind(node) === null ? null : `${node.module.row.id} ${kind(node)}`);
      for (const node of other.nodes) {
        if (!taken.has(node)) waiting.set(keyOf(node), [...(waiting.get(keyOf(node)) ?? []), node]);
      }
      for (const list of waiting.values()) list.reverse();
      for (const node of one.nodes) {
        const twin = twins.has(node) || keyOf(node) === null ? null : waiting.get(keyOf(node))?.pop();
        if (!twin) continue;
        twins.set(node, twin);
        taken.add(twin);
        if (!k) equal.add(node);
      }
    });
    return { twins, equal };
  }

  // Equal nodes of a module as one, where no path leads out of them and back: those that are as far, in changes and in
  // changes of the module, from the beginning. Returns the node that each one is a part of.
  function grouped({ nodes }, isEqual) {
    const far = [];
    const first = new Map();
    const heads = nodes.map((node) => {
      const steps = node.inputs.filter(([, from]) => from !== null && from < node.id)
        .map(([, from]) => far[from] + (isEqual(node) && isEqual(nodes[from]) && nodes[from].module === node.module ? 0 : 1));
      far.push(Math.max(0, ...steps));
      if (!isEqual(node)) return node;
      const key = `${node.module.row.id} ${far[node.id]}`;
      if (!first.has(key)) first.set(key, node);
      return first.get(key);
    });
    const groups = new Map();
    nodes.forEach((node, id) => groups.set(heads[id], [...(groups.get(heads[id]) ?? []), node]));
    return { heads, groups };
  }

  htp.pair = function ({ rows, changed }) {
    const models = new Map();
    const state = { row: null, sides: [], chosen: null };
    const drawings = ["left", "right"].map((name, k) => {
      const drawing = htp.drawingOf(byId(name), byId(`${name}-canvas`), {
        layers: { get inSight() { return state.sides[k].model.layers.inSight; }, get CARD() { return state.sides[k].model.layers.CARD; } },
        card: (box) => card(state.sides[k], box), changed: () => draw(k),
      });
      byId(name).addEventListener("scroll", () => draw(k));
      return drawing;
    });

    function modelFor(file) {
      if (!models.has(file)) models.set(file, modelOf(file, rows));
      return models.get(file);
    }

    // Two files: what is equal, what is open, and what is drawn as one.
    function sidesOf(left, right) {
      const [one, other] = [modelFor(left), modelFor(right)];
      const { twins, equal } = paired(one, other);
      const back = new Map([...twins].map(([node, twin]) => [twin, node]));
      const equalThere = new Set([...equal].map((node) => twins.get(node)));
      const side = (k, model, against, pairs, same) => ({
        k, model, file: model.file, other: against.file, twins: pairs, equal: same, ...grouped(model, (node) => same.has(node)),
        open: new Set(), apart: new Set(), module: model.modules.get(state.row),
      });
      return [side(0, one, other, twins, equal), side(1, other, one, back, equalThere)];
    }
    function statusOf(side, item) {
      if (item.kind === "node") return side.equal.has(item) ? "same" : side.twins.has(item) ? "changed" : "only";
      if (item.kind !== "module") return "";
      if (!side.other.has(item.row)) return "only";
      return side.file.structureOf(item.row) === side.other.structureOf(item.row) ? "same" : "changed";
    }

    function regroup(side) {
      const folds = byId("pair-fold").checked;
      side.headOf = side.model.nodes.map((node, id) => {
        const head = side.heads[id];
        return folds && side.groups.get(head).length > 1 && !side.apart.has(head) ? head : node;
      });
      side.found = side.model.layers.levels(side.headOf);
    }
    const groupOf = (side, item) => (item.kind === "node" && side.headOf[item.id] === item && byId("pair-fold").checked && !side.apart.has(item) ? side.groups.get(item) ?? [item] : [item]);

    // At first, what is changed is open in both, as far as there is room.
    function openFirst() {
      let level = [state.row];
      const counts = [0, 0];
      while (level.length) {
        const inside = state.sides.map((side) => level.flatMap((row) => [...(side.found.get(side.model.modules.get(row))?.items ?? [])]));
        inside.forEach((items, k) => (counts[k] += items.length));
        if (Math.max(...counts) > AT_FIRST && level[0] !== state.row) break;
        for (const side of state.sides) for (const row of level) if (side.model.modules.has(row)) side.open.add(side.model.modules.get(row));
        level = [...new Set(state.sides.flatMap((side, k) => inside[k].filter((item) => item.kind === "module" && statusOf(side, item) !== "same").map(({ row }) => row)))];
      }
    }

    function arrange(side) {
      if (!side.module) return;
      side.drawn = side.model.layers.laidOut(side.found, side.open, new Set(), side.module);
      drawings[side.k].place(side.drawn);
    }
    function draw(k) {
      const side = state.sides[k];
      if (side?.drawn) drawings[k].draw();
    }

    function counted(nodes) {
      const counts = new Map();
      for (const { op } of nodes) counts.set(op, (counts.get(op) ?? 0) + 1);
      return [...counts].map(([op, count]) => (count > 1 ? `${op} × ${count}` : op)).join(", ");
    }

    function card(side, box) {
      const { item } = box;
      const open = Boolean(box.lines);
      const group = groupOf(side, item);
      const isGroup = group.length > 1;
      const [label, below] = isGroup ? [`${group.length} equal nodes`, counted(group)]
        : item.kind === "node" ? [item.name, item.type]
          : item.kind === "module" ? [item.label, `${side.file.nodesOf(item.row)} node${side.file.nodesOf(item.row) === 1 ? "" : "s"}`] : [item.label, item.type];
      const folds = item.kind === "module" && side.found.get(item).items.size > 0;
      const status = statusOf(side, item);
      const head = htp.make("div", { className: "head" },
        folds ? htp.make("span", { className: `arrow${open ? " open" : ""}`, textContent: "▶" }) : null,
        item.kind === "node" && !isGroup ? htp.make("span", { className: "chip", textContent: item.op }) : null,
        htp.make("span", { className: "label path", textContent: htp.cut(label, item.kind === "node" && !isGroup ? Math.max(6, 26 - item.op.length) : 27) }),
        item.class ? htp.make("span", { className: "kind", textContent: htp.simple(item.class) }) : null);
      const isChosen = state.chosen && (state.chosen === item || chosenIn(side) === item);
      const element = htp.make("div", { className: `card ${item.kind} ${status}${isGroup ? " group" : ""}${open ? " open" : ""}${isChosen ? " selected" : ""}`, title: isGroup ? below : item.path ?? item.name ?? "" },
        htp.make("div", { className: "face" }, head, htp.make("div", { className: "numbers" }, htp.make("span", { textContent: below }))));
      Object.assign(element.style, { left: `${box.left}px`, top: `${box.top}px`, width: `${box.width}px`, height: `${box.height}px` });
      element.onclick = (event) => {
        event.stopPropagation();
        if (event.target.classList.contains("arrow")) return toggle(item);
        if (isGroup) return takeApart(side, item);
        choose(side, item);
      };
      element.ondblclick = (event) => {
        event.stopPropagation();
        if (folds && !event.target.classList.contains("arrow")) toggle(item);
      };
      return element;
    }

    // What is chosen in one file, in a file: itself, or what it is equal to, in what it is drawn in.
    function chosenIn(side) {
      const item = state.chosen;
      if (!item) return null;
      if (item.kind === "module") return side.model.modules.get(item.row) ?? null;
      if (item.kind !== "node") return null;
      const from = state.sides.find((each) => each.model.nodes[item.id] === item);
      const node = from === side ? item : from?.twins.get(item);
      return node ? side.headOf[node.id] : null;
    }
    function choose(side, item) {
      if (item.kind === "end") return;
      state.chosen = item;
      const said = item.kind === "node" ? `${item.op} ${item.name} ${item.type}` : `${item.path || "(root)"} ${item.class}`;
      byId("pair-said").textContent = `${said}: ${{ same: "equal in both files", changed: item.kind === "node" ? "with other inputs or settings in the other file" : "differs", only: `only in ${side.file.name}` }[statusOf(side, item)]}`;
      for (const other of state.sides) {
        let there = chosenIn(other);
        while (there && other.drawn && !other.drawn.boxOf.has(there)) there = there.kind === "node" ? there.module : there.above;
        if (other !== side && there && other.drawn) drawings[other.k].reach(other.drawn.boxOf.get(there));
        draw(other.k);
      }
    }
    // A module opens and closes in both files.
    function toggle(item) {
      const opens = !state.sides.some((side) => side.open.has(side.model.modules.get(item.row)));
      for (const side of state.sides) {
        const module = side.model.modules.get(item.row);
        if (module) side.open[opens ? "add" : "delete"](module);
        arrange(side);
        draw(side.k);
      }
    }
    // Equal nodes are shown one by one, in both files.
    function takeApart(side, head) {
      const other = state.sides[1 - side.k];
      side.apart.add(head);
      for (const node of side.groups.get(head)) other.apart.add(other.heads[side.twins.get(node).id]);
      state.sides.forEach(again);
    }
    function again(side) {
      regroup(side);
      arrange(side);
      draw(side.k);
    }

    function show(row, left, right) {
      Object.assign(state, { row, chosen: null });
      byId("pair").hidden = false;
      state.sides = sidesOf(left, right);
      state.sides.forEach(regroup);
      openFirst();
      byId("pair-name").textContent = row.path || "(root)";
      ["left", "right"].forEach((name, k) => {
        const side = state.sides[k];
        byId(`${name}-name`).textContent = side.module ? side.file.name : `${side.file.name} has no such module`;
        byId(`${name}-canvas`).hidden = !side.module;
        byId(name).setAttribute("aria-label", `Graph of ${row.path || "the whole model"} in ${side.file.name}`);
        arrange(side);
      });
      byId("pair-said").textContent = "";
      byId("pair-counts").textContent = countsOf();
      fit(0.6);
      changed();
    }
    function countsOf() {
      const inside = (side, node) => {
        for (let at = node.module; at; at = at.above) if (at === side.module) return true;
        return false;
      };
      const [left, right] = state.sides.map((side) => side.model.nodes.filter((node) => side.module && inside(side, node)));
      const counted = (word, side, nodes) => `${nodes.filter((node) => statusOf(state.sides[side], node) === word).length.toLocaleString("en")}`;
      return `${counted("same", 0, left)} equal nodes, ${counted("changed", 0, left)} with other inputs or settings, ${counted("only", 0, left)} only left, ${counted("only", 1, right)} only right`;
    }
    // Both as large as they fit, but not smaller than can be read, unless that is asked for.
    function fit(least = 0) {
      state.sides.forEach((side, k) => {
        if (!side.drawn) return;
        drawings[k].fit();
        if (drawings[k].scale < least) drawings[k].zoom(least);
        const box = side.drawn.boxes.find(({ item, lines }) => !lines && ["only", "changed"].includes(statusOf(side, item)));
        if (least && box) drawings[k].reach(box);
      });
    }
    function close() {
      byId("pair").hidden = true;
      state.row = null;
      state.sides = [];
      changed();
    }

    byId("pair-fold").onchange = () => {
      state.sides.forEach((side) => side.apart.clear());
      state.sides.forEach(again);
    };
    byId("pair-in").onclick = () => drawings.forEach((drawing) => drawing.zoom(drawing.scale * 1.25));
    byId("pair-out").onclick = () => drawings.forEach((drawing) => drawing.zoom(drawing.scale / 1.25));
    byId("pair-fit").onclick = () => fit();
    byId("pair-close").onclick = close;
    new ResizeObserver(() => [0, 1].forEach(draw)).observe(byId("sides"));
    return { state, show, close };
  };
})();
