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
  const LINE = 24;
  let top = htp.root;
  let boxes = [];

  const sizes = htp.columns.filter((column) => column.additive && column.most > 0);
  size.append(...sizes.map((column) => htp.make("option", { value: column.key, textContent: column.title })));
  colour.append(htp.make("option", { value: "class", textContent: "class" }),
    ...htp.columns.filter((column) => column.most > 0).map((column) => htp.make("option", { value: column.key, textContent: column.title })));
  size.value = (sizes.find((each) => each.main && each.key !== "nodes") ?? sizes[0])?.key;
  const column = (key) => htp.columns.find((each) => each.key === key);

  // What several modules share counts in each of them: parts are drawn to scale of their sum, where that is more.
  const weigh = (module) => {
    const value = column(size.value)?.of(module);
    return Number.isFinite(value) && value > 0 ? value : 0;
  };

  function fill(module) {
    const dark = document.documentElement.dataset.theme === "dark";
    if (colour.value === "class") {
      let hash = 7;
      for (const letter of module.class || module.label) hash = (hash * 31 + letter.codePointAt(0)) % 3600;
      return `hsl(${(hash * 137) % 360} ${dark ? "24% 30%" : "48% 86%"})`;
    }
    const { of, most, additive } = column(colour.value);
    const value = of(module);
    if (value === null) return dark ? "#2c313b" : "#eceef2";
    if (!Number.isFinite(value)) return dark ? "#b3303e" : "#e5808a";
    // Errors span many powers of ten, and what is wanted is where they begin.
    const part = additive ? Math.abs(value) / most : value === 0 ? 0 : Math.max(0, 1 + Math.log10(Math.abs(value) / most) / 6);
    const heat = Math.min(1, Math.max(0, part));
    return dark ? `hsl(${225 - 205 * heat} 52% ${24 + 18 * heat}%)` : `hsl(${225 - 205 * heat} 76% ${90 - 26 * heat}%)`;
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
    boxes.push({ module, x, y, width, height });
    if (width < 16 || height < 30 || !module.children.length) return;
    const parts = module.children.map((child) => [child, weigh(child)]);
    const inside = parts.reduce((sum, [, value]) => sum + value, 0);
    if (!inside) return;
    const own = Math.max(0, weigh(module) - inside);
    const room = own > 0.003 * weigh(module) ? [[null, own]] : [];
    split([...parts, ...room], x + 2, y + 18, width - 4, height - 20, (child, ...box) => child && treemap(child, ...box));
  }

  function flame(module, x, y, width) {
    boxes.push({ module, x, y, width, height: LINE });
    const parts = module.children.map((child) => [child, weigh(child)]);
    const whole = Math.max(weigh(module), parts.reduce((sum, [, value]) => sum + value, 0));
    let at = x;
    for (const [child, value] of parts) {
      const part = (width * value) / (whole || 1);
      if (part >= 1) flame(child, at, y + LINE, part);
      at += part;
    }
  }

  function draw() {
    const { clientWidth: width, clientHeight: height } = pane;
    if (!width || !height) return;
    boxes = [];
    if (shape.value === "flame") flame(top, 4, 4, width - 8);
    else treemap(top, 4, 4, width - 8, height - 8);
    canvas.width = width * devicePixelRatio;
    canvas.height = height * devicePixelRatio;
    const pen = canvas.getContext("2d");
    const style = getComputedStyle(document.documentElement);
    const [text, ground, accent] = ["--text", "--ground", "--accent"].map((name) => style.getPropertyValue(name));
    pen.scale(devicePixelRatio, devicePixelRatio);
    pen.font = "12px system-ui, sans-serif";
    pen.textBaseline = "middle";
    for (const { module, x, y, width: w, height: h } of boxes) {
      pen.fillStyle = fill(module);
      pen.fillRect(x, y, w, h);
      pen.lineWidth = 1;
      pen.strokeStyle = ground;
      pen.strokeRect(x + 0.5, y + 0.5, w - 1, h - 1);
      if (w > 34 && h > 14) write(pen, module, x, y, w, h, text);
    }
    const selected = htp.selected?.members ?? [htp.selected];
    for (const chosen of boxes.filter((box) => selected.includes(box.module))) {
      pen.lineWidth = 2.5;
      pen.strokeStyle = accent;
      pen.strokeRect(chosen.x + 1, chosen.y + 1, chosen.width - 2, chosen.height - 2);
    }
    drawCrumbs();
  }

  function write(pen, module, x, y, width, height, colourOfText) {
    const { unit } = column(size.value);
    const value = htp.compact(weigh(module), unit) + (unit === "ms" ? " ms" : "");
    pen.save();
    pen.beginPath();
    pen.rect(x + 4, y, width - 8, height);
    pen.clip();
    pen.fillStyle = colourOfText;
    const middle = y + Math.min(height, shape.value === "flame" ? LINE : 19) / 2;
    pen.fillText(module.label, x + 5, middle);
    const room = width - 12 - pen.measureText(module.label).width;
    if (room > pen.measureText(value).width + 8) {
      pen.globalAlpha = 0.62;
      pen.fillText(value, x + 5 + pen.measureText(module.label).width + 8, middle);
    }
    pen.restore();
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

  function at(event) {
    const { left, top: above } = canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - left, event.clientY - above];
    return boxes.findLast((box) => x >= box.x && x < box.x + box.width && y >= box.y && y < box.y + box.height)?.module;
  }

  function zoom(module) {
    top = module;
    draw();
  }

  canvas.addEventListener("mousemove", (event) => {
    const module = at(event);
    tip.hidden = !module;
    if (!module) return;
    const said = htp.columns.filter((each) => each.of(module) !== null && (each.main || each.key === size.value))
      .map((each) => `${each.title} ${htp.compact(each.of(module), each.unit)}${each.unit === "ms" ? " ms" : ""}`).join(" · ");
    tip.replaceChildren(htp.make("b", { className: "path", textContent: module.path || "(root)" }), `${htp.simple(module.class)} · ${said}`);
    const box = pane.getBoundingClientRect();
    tip.style.left = `${Math.min(event.clientX - box.left + 14, box.width - tip.offsetWidth - 6)}px`;
    tip.style.top = `${Math.min(event.clientY - box.top + 16, box.height - tip.offsetHeight - 6)}px`;
  });
  canvas.addEventListener("mouseleave", () => (tip.hidden = true));
  canvas.addEventListener("click", (event) => at(event) && htp.select(at(event), "map"));
  canvas.addEventListener("dblclick", (event) => at(event)?.children.length && zoom(at(event)));
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && pane.offsetParent && top.above) zoom(top.above);
  });
  for (const choice of [size, colour, shape]) choice.onchange = draw;
  htp.listeners.push(() => pane.offsetParent && draw());
  new ResizeObserver(draw).observe(pane);
  htp.map = { draw, zoom, boxes: () => boxes };
})();
