"use strict";
// A graph that is laid out, in an element that scrolls: its boxes and edges as far as they are in sight, so that its size
// does not matter; zoom, and dragging.
htp.svg = function (tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
};

// `layers` are those of the model, `card` makes the element of a box, and `changed` is called after a change of the zoom.
htp.drawingOf = function (graph, canvas, { layers, card, changed }) {
  const NEAR = 300; // pixels above and below the part in sight that are drawn, too
  const EDGES = 600; // drawn at once
  const LEAST = 0.08; // zoom
  const MOST = 3;
  const FARTHEST = 4; // pixels that a pointer moves before it drags
  const sheet = htp.make("div", { className: "sheet" });
  canvas.append(sheet);
  const arrowName = `${canvas.id}-arrow`;
  let laid = null;
  let scale = 1;

  function place(next) {
    laid = next;
    fitSizes();
  }
  function fitSizes() {
    Object.assign(canvas.style, { width: `${laid.root.width * scale}px`, height: `${laid.root.height * scale}px` });
    sheet.style.transform = scale === 1 ? "" : `scale(${scale})`;
    sheet.classList.toggle("zoomed", scale !== 1);
  }

  // Boxes and edges between two heights.
  function seen(top, bottom) {
    const [boxes, paths] = [[], []];
    (function visit(box) {
      if (box.top > bottom || box.top + box.height < top) return;
      boxes.push(box);
      if (!box.lines) return;
      const found = layers.inSight(box, top, bottom, laid.boxOf);
      paths.push(...found.paths.slice(0, EDGES));
      found.lines.forEach((line) => line.boxes.forEach(visit));
    })(laid.root);
    return { boxes, paths: paths.slice(0, EDGES) };
  }

  // Draw what is in sight; `lit` are pairs of boxes that are connected by thick lines.
  function draw(lit = []) {
    if (!laid || !graph.clientHeight) return;
    const { width, height } = laid.root;
    const [top, bottom] = [Math.max(0, (graph.scrollTop - NEAR) / scale), Math.min(height, (graph.scrollTop + graph.clientHeight + NEAR) / scale)];
    const { boxes, paths: edges } = seen(top, bottom);
    const arrowEnd = { "marker-end": `url(#${arrowName})` };
    const paths = edges.map(({ d, ends, back }) => htp.svg("path", { d, ...(ends ? arrowEnd : {}), ...(back ? { class: "back" } : {}) }));
    const thick = lit.map(([from, to]) => {
      const [x, y, u, v] = [from.left + from.width / 2, from.top + from.height, to.left + to.width / 2, to.top];
      const bend = Math.max(20, Math.abs(v - y) / 3);
      return htp.svg("path", { d: `M${x},${y}C${x},${y + bend} ${u},${v - bend} ${u},${v}`, class: "lit", ...arrowEnd });
    });
    const onTop = (name, ...drawn) => {
      const element = htp.svg("svg", { class: name, viewBox: `0 ${top} ${width} ${bottom - top}`, width, height: bottom - top, "aria-hidden": "true" }, ...drawn);
      element.style.top = `${top}px`;
      return element;
    };
    const arrow = htp.svg("marker", { id: arrowName, viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto" }, htp.svg("path", { d: "M0,0L8,4L0,8Z" }));
    // Open modules below, then the edges, then cards, so that edges pass behind these.
    const [opened, closed] = [boxes.filter((box) => box.lines), boxes.filter((box) => !box.lines)];
    sheet.replaceChildren(...opened.map(card), onTop("edges", htp.svg("defs", {}, arrow), ...paths), onTop("edges over", ...thick), ...closed.map(card));
  }

  // Bring a box into sight.
  function reach(box, scrollTo = (element, top) => (element.scrollTop = top)) {
    const [left, top] = [box.left * scale + canvas.offsetLeft, box.top * scale + canvas.offsetTop];
    const [width, height] = [layers.CARD.width * scale, layers.CARD.height * scale];
    const room = graph.clientHeight - height;
    if (top < graph.scrollTop || top > graph.scrollTop + room) scrollTo(graph, top - room / 2);
    if (left < graph.scrollLeft || left + width > graph.scrollLeft + graph.clientWidth) graph.scrollLeft = left + width / 2 - graph.clientWidth / 2;
  }

  // Change the zoom; the point of the drawing at a place of the window stays there, by default that in the middle.
  function zoom(next, x, y) {
    if (!laid) return;
    const wanted = Math.min(MOST, Math.max(LEAST, next));
    const view = graph.getBoundingClientRect();
    const [right, down] = [x ?? view.left + view.width / 2, y ?? view.top + view.height / 2];
    const before = canvas.getBoundingClientRect();
    const [column, row] = [(right - before.left) / scale, (down - before.top) / scale];
    scale = wanted;
    fitSizes();
    const after = canvas.getBoundingClientRect();
    graph.scrollLeft += after.left + column * scale - right;
    graph.scrollTop += after.top + row * scale - down;
    changed();
  }
  // Show the whole drawing, or a box, as large as it fits.
  function fit(box = laid?.root) {
    if (!box) return;
    const room = 24;
    const wanted = Math.min(1, (graph.clientWidth - room) / box.width, (graph.clientHeight - room) / box.height);
    zoom(wanted);
    graph.scrollLeft = box.left * scale + canvas.offsetLeft - (graph.clientWidth - box.width * scale) / 2;
    graph.scrollTop = box.top * scale + canvas.offsetTop - (graph.clientHeight - box.height * scale) / 2;
    changed();
  }
  graph.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    zoom(scale * 1.0015 ** -event.deltaY, event.clientX, event.clientY);
  }, { passive: false });

  // A drag moves the drawing, and is no click; a finger scrolls it anyway.
  let drag = null;
  graph.addEventListener("pointerdown", (event) => {
    const isDrag = event.button === 0 && event.pointerType === "mouse";
    drag = isDrag ? { x: event.clientX, y: event.clientY, left: graph.scrollLeft, top: graph.scrollTop, moved: false } : null;
  });
  graph.addEventListener("pointermove", (event) => {
    if (!drag || !(event.buttons & 1)) return;
    const [right, down] = [event.clientX - drag.x, event.clientY - drag.y];
    if (!drag.moved && Math.hypot(right, down) < FARTHEST) return;
    if (!drag.moved) graph.setPointerCapture(event.pointerId);
    drag.moved = true;
    graph.classList.add("dragged");
    Object.assign(graph, { scrollLeft: drag.left - right, scrollTop: drag.top - down });
  });
  graph.addEventListener("pointerup", () => graph.classList.remove("dragged"));
  graph.addEventListener("click", (event) => drag?.moved && event.stopPropagation(), true);

  return { place, draw, reach, zoom, fit, get scale() { return scale; } };
};
