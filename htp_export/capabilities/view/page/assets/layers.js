"use strict";
// The graph by module: what stands in each module, how it is connected there, and where it is drawn. A model has `nodes`,
// `modules`, the `root` of these, `inputs` and `outputs` as [name, type], and tells the module that a node lies in (`homeOf`)
// and whether the node computes nothing (`isTrivial`).
htp.layersOf = function ({ nodes, modules, root, inputs, outputs, homeOf, isTrivial = () => false }) {
  const CARD = { width: 216, height: 44 };
  const GAP = { x: 14, y: 24 };
  const PAD = 12;
  const LANE = 8; // between edges that pass by other cards, at the left
  const LANES = 12; // of more, some are drawn on top of others
  const ACROSS = 8; // cards beside each other; of more, there are several lines

  const home = new Map(nodes.map((node) => [node, homeOf(node)]));
  const consumers = nodes.map(() => new Set());
  for (const node of nodes) for (const [, from] of node.inputs) if (from !== null) consumers[from].add(node);
  const makers = new Map(nodes.flatMap((node) => node.outputs.map(([name]) => [name, node])));
  const ends = { inputs: gathered("in", inputs), outputs: gathered("out", outputs) };
  const containerOf = (item) => (item.kind === "node" ? home.get(item) : item.kind === "module" ? item.above : root);

  const trivial = nodes.map(isTrivial);

  // Inputs or outputs as items. If they fill more than a line, those whose names differ in numbers alone, such as those of
  // a cache, are one.
  function gathered(word, tensors) {
    const alike = new Map();
    for (const tensor of tensors) {
      const pattern = tensor[0].replace(/\d+/g, "#");
      alike.set(pattern, [...(alike.get(pattern) ?? []), tensor]);
    }
    const item = (name, type, members) => ({ kind: "end", word, name, type, label: `${word} ${name}`, members });
    return [...alike.values()].flatMap((members) => {
      if (members.length < 2 || tensors.length <= ACROSS) return members.map((tensor) => item(...tensor, [tensor]));
      const types = [...new Set(members.map(([, type]) => type))];
      return [item(rangeOf(members.map(([name]) => name)), `${members.length} × ${types.length > 1 ? `${types.length} types` : types[0]}`, members)];
    });
  }
  // Names that differ in numbers as one: "past.0…11.key".
  function rangeOf(names) {
    const numbers = names.map((name) => name.match(/\d+/g).map(Number));
    let k = 0;
    return names[0].replace(/\d+/g, (number) => {
      const values = numbers.map((each) => each[k]);
      k++;
      const [least, most] = [Math.min(...values), Math.max(...values)];
      return least === most ? number : `${least}…${most}`;
    });
  }

  // Trivial nodes as part of a neighbour in the same module: of the producer of all that they read, else of the only
  // consumer of what they make. No other path joins the two then, so that the graph stays without cycles. Returns the
  // node that each node is a part of.
  function merged() {
    const head = nodes.map((_, id) => id);
    const parts = nodes.map((node) => [node]);
    const find = (id) => {
      while (head[id] !== id) id = head[id] = head[head[id]];
      return id;
    };
    function join(id, neighbours) {
      const [into, other] = new Set(neighbours.map(find).filter((each) => each !== id));
      if (into === undefined || other !== undefined || home.get(nodes[into]) !== home.get(nodes[id])) return;
      head[id] = into;
      parts[into].push(...parts[id]);
    }
    trivial.forEach((is, id) => is && join(id, nodes[id].inputs.map(([, from]) => from).filter((from) => from !== null)));
    for (let id = head.length - 1; id >= 0; id--) {
      if (trivial[id] && head[id] === id) join(id, parts[id].flatMap((node) => [...consumers[node.id]].map((reader) => reader.id)));
    }
    return nodes.map((_, id) => nodes[find(id)]);
  }

  // What stands in each module, and the edges between these. `headOf` has the node that each node is drawn in.
  function levels(headOf) {
    const found = new Map(modules.map((module) => [module, { items: new Set(), next: new Map(), entries: new Set(), exits: new Set() }]));
    function link(from, to) {
      let [a, b] = [from, to];
      let [left, right] = [containerOf(a), containerOf(b)];
      while (left !== right) {
        if (left.depth >= right.depth) {
          found.get(left).exits.add(a);
          [a, left] = [left, left.above];
        } else {
          found.get(right).entries.add(b);
          [b, right] = [right, right.above];
        }
      }
      if (a === b) return;
      const { next } = found.get(left);
      if (!next.has(a)) next.set(a, new Set());
      next.get(a).add(b);
    }
    const entering = new Map(ends.inputs.flatMap((input) => input.members.map(([name]) => [name, input])));
    for (const input of ends.inputs) found.get(root).items.add(input);
    for (const node of nodes) {
      const drawn = headOf[node.id];
      for (let item = drawn, above = home.get(drawn); above && !found.get(above).items.has(item); [item, above] = [above, above.above]) found.get(above).items.add(item);
      for (const [name, from] of node.inputs) {
        const source = from === null ? entering.get(name) : headOf[from];
        if (source && source !== drawn) link(source, drawn);
      }
    }
    for (const output of ends.outputs) {
      found.get(root).items.add(output);
      for (const [name] of output.members) {
        const maker = makers.get(name);
        const source = maker ? headOf[maker.id] : entering.get(name);
        if (source) link(source, output);
      }
    }
    return found;
  }

  // Whether a path leads out of some items of a level and back into them.
  function leadsBack({ next }, items) {
    const pending = [...items].flatMap((item) => [...(next.get(item) ?? [])]).filter((item) => !items.has(item));
    const seen = new Set(pending);
    while (pending.length) {
      for (const reader of next.get(pending.pop()) ?? []) {
        if (items.has(reader)) return true;
        if (!seen.has(reader)) pending.push(reader);
        seen.add(reader);
      }
    }
    return false;
  }

  // A level with alike modules as one item each, but for those that are taken apart, and where the one would read itself.
  function joined(level, apart) {
    for (const fold of new Set([...level.items].map((item) => item.run?.fold).filter((fold) => fold && !apart.has(fold)))) {
      const members = new Set(fold.members);
      if (!fold.members.every((member) => level.items.has(member)) || leadsBack(level, members)) continue;
      const one = (item) => (members.has(item) ? fold : item);
      const [items, entries, exits] = [level.items, level.entries, level.exits].map((each) => new Set([...each].map(one)));
      const next = new Map();
      for (const [from, readers] of level.next) {
        if (!next.has(one(from))) next.set(one(from), new Set());
        for (const to of readers) if (one(to) !== one(from)) next.get(one(from)).add(one(to));
      }
      level = { items, next, entries, exits };
    }
    return level;
  }

  // Items in an order in which producers come first, as far as there is one, and the line that each is drawn in.
  function ranked({ items, next, entries }) {
    const before = new Map([...items].map((item) => [item, []]));
    for (const [from, readers] of next) for (const to of readers) before.get(to).push(from);
    const order = [];
    const seen = new Set();
    for (const item of items) {
      const stack = seen.has(item) ? [] : [[item, 0]];
      seen.add(item);
      while (stack.length) {
        const top = stack.at(-1);
        const waiting = before.get(top[0])[top[1]++];
        if (!waiting) order.push(stack.pop()[0]);
        else if (!seen.has(waiting)) {
          seen.add(waiting);
          stack.push([waiting, 0]);
        }
      }
    }
    const rank = new Map();
    for (const item of order) rank.set(item, 1 + before.get(item).reduce((most, from) => Math.max(most, rank.get(from) ?? -1), -1));
    // What needs nothing stands right above what reads it.
    for (const [item, readers] of next) {
      if (before.get(item).length || entries.has(item)) continue;
      const nearest = [...readers].reduce((least, reader) => Math.min(least, rank.get(reader)), Infinity);
      rank.set(item, Math.max(0, nearest - 1));
    }
    const lines = [];
    const column = new Map();
    const middle = (item) => {
      const from = before.get(item).map((each) => column.get(each)).filter((place) => place !== undefined);
      return from.length ? from.reduce((sum, place) => sum + place, 0) / from.length : 0.5;
    };
    const byRank = [];
    for (const item of order) (byRank[rank.get(item)] ??= []).push(item);
    for (const line of byRank.filter(Boolean)) {
      const wanted = new Map(line.map((item) => [item, middle(item)]));
      line.sort((a, b) => wanted.get(a) - wanted.get(b));
      for (let k = 0; k < line.length; k += ACROSS) lines.push(line.slice(k, k + ACROSS));
      line.forEach((item, k) => column.set(item, (k + 0.5) / line.length));
    }
    return lines;
  }

  // The edges of a module by line, so that those in sight are found without the others. An edge to the next line is
  // `direct`. Others leave their line at `starts`, pass by at the left along the `trunk` of their producer, and arrive at
  // `ends`. All that leave the module have trunks in one lane, since they arrive at one place. Before the first line is the top of the module, after the last one its bottom; there, an end is null.
  function edgesOf(level) {
    const lineOf = new Map(level.lines.flatMap((line, k) => line.map((item) => [item, k])));
    const count = level.lines.length;
    const [direct, starts, ends] = [0, 1, 2].map(() => Array.from({ length: count + 2 }, () => []));
    const [trunks, leaving] = [new Map(), new Map()];
    function add(from, to) {
      const [start, stop] = [from ? lineOf.get(from) : -1, to ? lineOf.get(to) : count];
      if (stop === start + 1) return direct[start + 1].push({ from, to });
      const known = to ? trunks : leaving;
      if (!known.has(from)) {
        known.set(from, { from, start: start + 1, first: stop, last: stop, leaves: !to });
        starts[start + 1].push(known.get(from));
      }
      const trunk = known.get(from);
      trunk.first = Math.min(trunk.first, stop);
      trunk.last = Math.max(trunk.last, stop);
      ends[stop + 1].push({ to, trunk, back: stop <= start });
    }
    for (const to of level.entries) add(null, to);
    for (const [from, readers] of level.next) for (const to of readers) add(from, to);
    for (const from of level.exits) add(from, null);
    const ending = [];
    const from = ({ start, first }) => Math.min(start, first);
    const all = [...trunks.values(), ...leaving.values()];
    let laneOut = -1;
    for (const trunk of all.sort((a, b) => from(a) - from(b))) {
      let lane = trunk.leaves ? laneOut : ending.findIndex((last) => last < from(trunk));
      if (lane < 0) lane = ending.length < LANES ? ending.length : LANES - 1;
      if (trunk.leaves) laneOut = lane;
      ending[lane] = trunk.leaves ? count : Math.max(ending[lane] ?? 0, trunk.start, trunk.last);
      trunk.lane = lane;
    }
    return { direct, starts, ends, trunks: all, lanes: ending.length };
  }

  // A module or node with its size; an open module with what stands in it, and where. Of several modules that are drawn as
  // one, that is what stands in the first.
  function boxOf(item, found, open, apart) {
    if (!open.has(item)) return { item, ...CARD };
    const whole = found.get(item.members?.[0] ?? item);
    if (!whole.drawn) {
      whole.drawn = joined(whole, apart);
      whole.lines = ranked(whole.drawn);
      whole.edges = edgesOf({ ...whole.drawn, lines: whole.lines });
    }
    const { edges } = whole;
    const { lanes } = edges;
    const lines = whole.lines.map((line) => {
      const boxes = line.map((each) => boxOf(each, found, open, apart));
      const width = boxes.reduce((sum, box) => sum + box.width + GAP.x, -GAP.x);
      return { boxes, width, height: Math.max(...boxes.map((box) => box.height)) };
    });
    const left = PAD + (lanes ? lanes * LANE + PAD : 0);
    const widest = lines.reduce((most, line) => Math.max(most, line.width), CARD.width);
    let y = CARD.height + GAP.y;
    for (const line of lines) {
      line.y = y;
      let x = left + (widest - line.width) / 2;
      for (const box of line.boxes) {
        Object.assign(box, { x, y });
        x += box.width + GAP.x;
      }
      y += line.height + GAP.y;
    }
    return { item, width: left + widest + PAD, height: y, lines, edges };
  }

  // All boxes, each after the one around it, with their places in the whole drawing.
  function laidOut(found, open, apart, top = root) {
    const whole = boxOf(top, found, open, apart);
    const boxes = [];
    const pending = [[whole, 0, 0, 0, null]];
    while (pending.length) {
      const [box, left, top, depth, around] = pending.pop();
      Object.assign(box, { left, top, depth, around });
      boxes.push(box);
      for (const child of (box.lines ?? []).flatMap((line) => line.boxes).reverse()) pending.push([child, left + child.x, top + child.y, depth + 1, box]);
    }
    return { root: whole, boxes, boxOf: new Map(boxes.flatMap((box) => [box.item, ...(box.item.members ?? [])].map((item) => [item, box]))) };
  }

  // The edges of an open module between two heights, as paths, and the first and last of its lines that are in sight.
  function inSight(box, top, bottom, boxes) {
    const { lines, edges } = box;
    if (!lines.length) return { lines, paths: [] };
    let [first, high] = [0, lines.length - 1];
    while (first < high) {
      const middle = (first + high) >> 1;
      if (box.top + lines[middle].y + lines[middle].height < top) first = middle + 1;
      else high = middle;
    }
    let last = first;
    while (last + 1 < lines.length && box.top + lines[last + 1].y <= bottom) last++;
    const lower = (k) => box.top + (k < 0 ? CARD.height : lines[k].y + lines[k].height); // the bottom of a line
    const upper = (k) => (k < lines.length ? box.top + lines[k].y : box.top + box.height);
    const centre = (item) => {
      const { left, width } = item ? boxes.get(item) : box;
      return left + width / 2;
    };
    const under = (item, k) => (item ? boxes.get(item).top + boxes.get(item).height : lower(k));
    const laneOf = (trunk) => box.left + PAD + trunk.lane * LANE;
    const half = GAP.y / 2;
    const paths = [];
    for (let k = first - 1; k <= last; k++) {
      const y = lower(k);
      for (const { from, to } of edges.direct[k + 1]) {
        const [x, u] = [centre(from), centre(to)];
        paths.push({ d: `M${x},${under(from, k)}V${y}C${x},${y + half} ${u},${y + half} ${u},${upper(k + 1)}`, ends: true });
      }
      for (const trunk of edges.starts[k + 1]) {
        const [x, u] = [centre(trunk.from), laneOf(trunk)];
        paths.push({ d: `M${x},${under(trunk.from, k)}V${y}C${x},${y + half} ${u},${y} ${u},${y + GAP.y}` });
      }
    }
    for (let k = first; k <= last + 1; k++) {
      const y = upper(k);
      for (const { to, trunk, back } of edges.ends[k + 1]) {
        const [x, u] = [laneOf(trunk), centre(to)];
        paths.push({ d: `M${x},${y - GAP.y}C${x},${y} ${u},${y - half} ${u},${y}`, ends: true, back });
      }
    }
    for (const trunk of edges.trunks) {
      const start = upper(trunk.start);
      const [y, v] = [Math.max(top, Math.min(start, lower(trunk.first - 1))), Math.min(bottom, Math.max(start, lower(trunk.last - 1)))];
      if (y < v) paths.push({ d: `M${laneOf(trunk)},${y}V${v}` });
    }
    return { lines: lines.slice(first, last + 1), paths };
  }

  return { CARD, ends, home, consumers, trivial, merged, levels, laidOut, inSight };
};
