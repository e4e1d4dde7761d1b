"use strict";
// Modules as areas: a treemap, or a flame with a line for each level. Size and colour are two measures.
(function () {
  const pane = document.getElementById("map");
  const canvas = pane.querySelector("canvas");
  const tip = document.getElementById("tip");
  const crumbs = document.getElementById("crumbs");
  const size = document.getElementById("map-size");
  const colour = document.getElementById("map-colour");
  const shape = document.getElementById("map-shape");
  const legend = document.getElementById("legend");
  const TITLE = 19; // of the line that names an area
  const CLASSES = 12;
  let top = htp.root;
  let boxes = [];

  const sizes = htp.columns.filter((column) => column.additive && column.most > 0);
  size.append(...sizes.map((column) => htp.make("option", { value: column.key, textContent: column.title })));
  colour.append(...htp.colours.options());
  size.value = (sizes.find((each) => each.main && each.key !== "nodes") ?? sizes[0])?.key;
  const column = (key) => htp.columns.find((each) => each.key === key);
  const { empty, strange, heated, ofClass, ofWord, ofValue } = htp.colours;

  // A weight of several modules has its area in the first of them. Of other numbers, what modules share counts in each:
  // parts are drawn to scale of their sum, where that is more.
  const weigh = (module) => {
    const shown = column(size.value);
    const value = (shown?.once ?? shown?.of)?.(module);
    return Number.isFinite(value) && value > 0 ? value : 0;
  };

  const ties = (module) => (column(size.value)?.once ? htp.ties.get(module) ?? [] : []);
  const elsewhere = (module) => {
    const shown = column(size.value);
    const more = shown?.once ? shown.of(module) - shown.once(module) : 0;
    return more > 0 ? [`${htp.withUnit(more, shown)} of its ${shown.title} count in a module before it`] : [];
  };
  const labelOf = (module) => (ties(module).length ? `${module.label} · tied` : module.label);

  // What is coloured. Of what adds up, a module that holds others has more than each of them: it shows what it has itself.
  function worth({ module, leaf }) {
    const { of, ownOf, additive } = column(colour.value);
    return leaf || !additive ? of(module) : ownOf?.(module) ?? null;
  }
  // The largest value that is drawn: in a part of the model, colours tell its modules apart.
  const mostDrawn = () => Math.max(0, ...boxes.map(worth).filter((value) => value !== null).map(Math.abs).filter(Number.isFinite));

  // What has no numbers is coloured by kind: by class, or by a word of a result.
  const byKind = () => colour.value === "class" || column(colour.value).named;
  const kindOf = (module) => (colour.value === "class" ? htp.simple(module.class) || "no class" : htp.word(module, column(colour.value)) || "not known");
  const ofKind = (module) => (colour.value === "class" ? ofClass(module) : ofWord(column(colour.value), module));
  const fill = (box, most) => (byKind() ? ofKind(box.module) : ofValue(column(colour.value), worth(box), most));

  const swatch = (background, text) => htp.make("span", { className: "swatch" }, htp.make("i", { style: { background } }), text);
  function drawLegend(most) {
    if (byKind()) {
      const areas = new Map();
      for (const { module, width, height } of boxes) {
        const kind = colour.value === "class" ? module.class : kindOf(module);
        const [area] = areas.get(kind) ?? [0];
        areas.set(kind, [area + width * height, module]);
      }
      const largest = [...areas.entries()].sort((a, b) => b[1][0] - a[1][0]);
      legend.replaceChildren(...largest.slice(0, CLASSES).map(([, [, module]]) => swatch(ofKind(module), kindOf(module))),
        largest.length > CLASSES ? `and ${largest.length - CLASSES} more ${colour.value === "class" ? "classes" : "words"}` : "");
      return;
    }
    const shown = column(colour.value);
    const ramp = `linear-gradient(90deg, ${[0, 0.25, 0.5, 0.75, 1].map(heated).join(", ")})`;
    const least = shown.additive ? 0 : most / 1e6;
    const text = (textContent) => htp.make("span", { textContent });
    const values = boxes.map(worth);
    const partly = shown.additive && boxes.some((box) => !box.leaf);
    legend.replaceChildren(...[
      text(shown.title), text(`${shown.additive ? "" : "≤ "}${htp.withUnit(least, shown)}`),
      htp.make("span", { className: "ramp", style: { background: ramp } }), text(`${htp.withUnit(most, shown)}, the largest drawn`),
      values.some((value) => value !== null && !Number.isFinite(value)) ? swatch(strange(), "not a number") : null,
      values.includes(null) ? swatch(empty(), partly ? "what it holds is drawn in it" : "not known") : null,
      partly && shown.ownOf ? text("around others: what the module has itself") : null,
    ].filter(Boolean));
  }

  function split(items, x, y, width, height, place) {
    // Squarified: Bruls, Huizing and van Wijk, "Squarified Treemaps", 2000.
    let rest = items.filter(([, value]) => value > 0).sort((a, b) => b[1] - a[1]);
    let total = rest.reduce((sum, [, value]) => sum + value, 0);
    while (rest.length && width > 1 && height > 1) {
      const side = Math.min(width, height);
      const scale = (width * height) / total;
      const worst = (sum, count) => {
        const thick = (sum * scale) / side;
        return Math.max(...[0, count - 1].map((k) => ((rest[k][1] * scale) / thick / thick)).map((ratio) => Math.max(ratio, 1 / ratio)));
      };
      let count = 1;
      let sum = rest[0][1];
      while (count < rest.length && worst(sum + rest[count][1], count + 1) <= worst(sum, count)) sum += rest[count++][1];
      const thick = (sum * scale) / side;
      let at = 0;
      for (const [item, value] of rest.slice(0, count)) {
        const long = (value * scale) / thick;
        if (width >= height) place(item, x, y + at, thick, long);
        else place(item, x + at, y, long, thick);
        at += long;
      }
      if (width >= height) [x, width] = [x + thick, width - thick];
      else [y, height] = [y + thick, height - thick];
      total -= sum;
      rest = rest.slice(count);
    }
  }

  function treemap(module, x, y, width, height) {
    const box = { module, x, y, width, height, leaf: true };
    boxes.push(box);
    if (width < 16 || height < 30 || !module.children.length) return;
    const parts = module.children.map((child) => [child, weigh(child)]);
    const inside = parts.reduce((sum, [, value]) => sum + value, 0);
    if (!inside) return;
    const own = Math.max(0, weigh(module) - inside);
    const room = own > 0.003 * weigh(module) ? [[null, own]] : [];
    split([...parts, ...room], x + 2, y + 18, width - 4, height - 20, (child, ...place) => {
      if (!child) return;
      box.leaf = false;
      treemap(child, ...place);
    });
  }

  function flame(module, x, width, level = 0) {
    const box = { module, x, width, level, leaf: true };
    boxes.push(box);
    const parts = module.children.map((child) => [child, weigh(child)]);
    const whole = Math.max(weigh(module), parts.reduce((sum, [, value]) => sum + value, 0));
    let at = x;
    for (const [child, value] of parts) {
      const part = (width * value) / (whole || 1);
      if (part >= 1) {
        flame(child, at, part, level + 1);
        box.leaf = false;
      }
      at += part;
    }
  }

  // The lines of a flame share the height.
  function stack(height) {
    const line = height / (1 + Math.max(...boxes.map(({ level }) => level)));
    for (const box of boxes) Object.assign(box, { y: 4 + box.level * line, height: line });
  }

  function draw() {
    const { clientWidth: width, clientHeight: height } = pane;
    if (!width || !height) return;
    boxes = [];
    if (shape.value === "flame") {
      flame(top, 4, width - 8);
      stack(height - 8);
    } else treemap(top, 4, 4, width - 8, height - 8);
    canvas.width = width * devicePixelRatio;
    canvas.height = height * devicePixelRatio;
    const pen = canvas.getContext("2d");
    pen.scale(devicePixelRatio, devicePixelRatio);
    drawLegend(mostColoured());
    paint(onCanvas(pen));
    drawCrumbs();
  }

  const mostColoured = () => (byKind() ? 0 : mostDrawn());
  const FONT = "system-ui, sans-serif";

  // The areas, their lines and their names, on paper: a canvas, or SVG.
  function paint(paper) {
    const style = getComputedStyle(document.documentElement);
    const [text, ground, accent] = ["--text", "--ground", "--accent"].map((name) => style.getPropertyValue(name));
    const most = mostColoured();
    for (const box of boxes) {
      const { module, x, y, width: w, height: h } = box;
      paper.area(x, y, w, h, fill(box, most));
      paper.frame(x + 0.5, y + 0.5, w - 1, h - 1, ground, 1);
      if (w > 34 && h > 14) write(paper, module, x, y, w, h, text);
    }
    const selected = htp.selected?.members ?? [htp.selected];
    for (const chosen of boxes.filter((box) => selected.includes(box.module)))
      paper.frame(chosen.x + 1, chosen.y + 1, chosen.width - 2, chosen.height - 2, accent, 2.5);
  }

  function onCanvas(pen) {
    pen.textBaseline = "middle";
    return {
      area: (x, y, width, height, colourOfArea) => {
        pen.fillStyle = colourOfArea;
        pen.fillRect(x, y, width, height);
      },
      frame: (x, y, width, height, colourOfLine, thickness) => {
        [pen.strokeStyle, pen.lineWidth] = [colourOfLine, thickness];
        pen.strokeRect(x, y, width, height);
      },
      // Words in an area, which cuts what is longer.
      words: (area, x, middle, words, colourOfText) => {
        pen.save();
        pen.beginPath();
        pen.rect(...area);
        pen.clip();
        pen.fillStyle = colourOfText;
        for (const [weight, shift, textOf] of words) {
          pen.font = `${weight} 12px ${FONT}`;
          pen.fillText(textOf, x + shift, middle);
        }
        pen.restore();
      },
    };
  }

  function asSvg(parts) {
    return {
      area: (x, y, width, height, colourOfArea) => parts.push(htp.svg("rect", { x, y, width, height, fill: colourOfArea })),
      frame: (x, y, width, height, colourOfLine, thickness) => parts.push(htp.svg("rect", {
        x, y, width: Math.max(0, width), height: Math.max(0, height), fill: "none", stroke: colourOfLine, "stroke-width": thickness,
      })),
      words: ([left, above, width, height], x, middle, words, colourOfText) => {
        const texts = words.map(([weight, shift, textOf]) => {
          const text = htp.svg("text", { x: x + shift, y: middle, "dominant-baseline": "central", fill: colourOfText, "font-family": FONT, "font-size": 12, "font-weight": weight });
          text.textContent = textOf;
          return text;
        });
        parts.push(htp.svg("svg", { x: left, y: above, width, height, viewBox: `${left} ${above} ${width} ${height}` }, ...texts));
      },
    };
  }

  function svgOf() {
    const parts = [];
    paint(asSvg(parts));
    return htp.picture.sheet(pane.clientWidth, pane.clientHeight, parts);
  }

  // The width of a name in bold, for the number behind it.
  const measure = document.createElement("canvas").getContext("2d");
  function widthOf(text, weight) {
    measure.font = `${weight} 12px ${FONT}`;
    return measure.measureText(text).width;
  }

  // A text that fits: without its end if that is too long, and nothing if no letter fits.
  function shortened(text, room) {
    if (widthOf(text, 600) <= room) return text;
    let count = Math.min(text.length - 1, Math.floor(room / 4));
    while (count > 0 && widthOf(`${text.slice(0, count)}…`, 600) > room) count -= 1;
    return count > 0 ? `${text.slice(0, count)}…` : "";
  }

  function write(paper, module, x, y, width, height, colourOfText) {
    const { unit } = column(size.value);
    const value = htp.withUnit(weigh(module), { unit });
    const middle = y + (shape.value === "flame" ? height : Math.min(height, TITLE)) / 2;
    const label = shortened(labelOf(module), width - 9);
    const words = [[600, 0, label]];
    const end = widthOf(label, 600) + 8;
    if (width - 12 - end > widthOf(value, 400)) words.push([400, end, value]);
    paper.words([x + 4, y, width - 8, height], x + 5, middle, words, colourOfText);
  }

  function drawCrumbs() {
    const way = [];
    for (let module = top; module; module = module.above) way.unshift(module);
    crumbs.replaceChildren(...(way.length < 2 ? [] : way.map((module, k) => {
      const anchor = htp.make("a", { textContent: `${k ? "› " : ""}${module.label}`, tabIndex: 0, role: "button" });
      anchor.onclick = () => zoom(module);
      anchor.onkeydown = (event) => event.key === "Enter" && zoom(module);
      return anchor;
    })));
  }

  // What is said of a module: the main columns, and what sizes and colours stand for.
  const isShown = (each) => each.main || each.key === size.value;
  const facts = (module) => htp.columns.filter((each) => isShown(each) && (each.named ? htp.word(module, each) : each.of(module) !== null))
    .map((each) => `${each.title} ${each.named ? htp.word(module, each) : htp.withUnit(each.of(module), each)}`);

  function at(event) {
    const { left, top: above } = canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - left, event.clientY - above];
    return boxes.findLast((box) => x >= box.x && x < box.x + box.width && y >= box.y && y < box.y + box.height)?.module;
  }

  function zoom(module) {
    top = module;
    draw();
  }

  document.getElementById("map-png").onclick = () => canvas.toBlob((image) => htp.picture.save(image, `${htp.data.name}.png`), "image/png");
  document.getElementById("map-svg").onclick = () => htp.picture.save(new Blob([svgOf()], { type: "image/svg+xml" }), `${htp.data.name}.svg`);

  canvas.addEventListener("mousemove", (event) => {
    const module = at(event);
    tip.hidden = !module;
    if (!module) return;
    const said = facts(module).join(" · ");
    tip.replaceChildren(htp.make("b", { className: "path", textContent: module.path || "(root)" }), `${htp.simple(module.class)} · ${said}`,
      ...[...ties(module), ...elsewhere(module)].map((line) => htp.make("div", { textContent: line })));
    const box = pane.getBoundingClientRect();
    tip.style.left = `${Math.min(event.clientX - box.left + 14, box.width - tip.offsetWidth - 6)}px`;
    tip.style.top = `${Math.min(event.clientY - box.top + 16, box.height - tip.offsetHeight - 6)}px`;
  });
  canvas.addEventListener("mouseleave", () => (tip.hidden = true));
  canvas.addEventListener("click", (event) => at(event) && htp.select(at(event), "map"));
  canvas.addEventListener("dblclick", (event) => at(event)?.children.length && zoom(at(event)));
  // By keyboard: among the areas that are drawn, the largest of a module first.
  const drawn = (module) => boxes.find((box) => box.module === module);
  const within = (module) => module.children.filter(drawn).sort((a, b) => weigh(b) - weigh(a));
  function current() {
    let module = htp.selected?.members?.[0] ?? (htp.selected?.kind === "node" ? htp.byPath.get(htp.selected.owners[0]) : htp.selected);
    while (module && !drawn(module)) module = module.above;
    return module ?? top;
  }
  function go(module) {
    if (!module || !drawn(module)) return;
    htp.select(module, "map");
    const siblings = module === top ? [top] : within(module.above);
    const said = facts(module);
    document.getElementById("map-said").textContent = `${module.path || "the whole model"}, ${htp.simple(module.class)}, ${siblings.indexOf(module) + 1} of ${siblings.length}; ${[...said, ...ties(module), ...elsewhere(module)].join(", ")}`;
  }
  function beside(module, step) {
    const siblings = module === top ? [top] : within(module.above);
    return siblings[siblings.indexOf(module) + step];
  }
  canvas.addEventListener("keydown", (event) => {
    const module = current();
    const keys = {
      ArrowRight: () => go(beside(module, 1)),
      ArrowLeft: () => go(beside(module, -1)),
      ArrowDown: () => go(within(module)[0]),
      ArrowUp: () => module !== top && go(module.above),
      Home: () => go(top),
      Enter: () => {
        if (module.children.length) zoom(module);
        go(module);
      },
    };
    if (!keys[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    keys[event.key]();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && pane.offsetParent && top.above) zoom(top.above);
  });
  for (const choice of [size, colour, shape]) choice.onchange = draw;
  htp.listeners.push(() => pane.offsetParent && draw());
  new ResizeObserver(draw).observe(pane);
  htp.map = { draw, zoom, boxes: () => boxes, labelOf, svgOf };
})();
