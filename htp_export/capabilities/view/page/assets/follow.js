"use strict";
// A table that scrolls with a graph, a graph that scrolls with its table, and an overview of the graph.
(function () {
  const span = (element) => Math.max(1, element.scrollHeight - element.clientHeight);

  // The end of one is the end of the other, and in between, the row at a height of the drawing is where the height is.
  // `tops` has the height of each row, which never decreases.
  htp.together = function (graph, table, { tops, height, isOn, draw, drawRows }) {
    const moved = new Map(); // where a part was scrolled to from here, which its own event need not answer
    function scrollTo(element, top) {
      const wanted = Math.max(0, Math.min(span(element), Math.round(top)));
      if (Math.abs(element.scrollTop - wanted) < 1) return;
      element.scrollTop = wanted;
      moved.set(element, element.scrollTop);
    }
    function isOwn(element) {
      const same = Math.abs((moved.get(element) ?? -9) - element.scrollTop) < 2;
      moved.delete(element);
      return same;
    }
    const ends = (at) => [tops()[at], tops()[at + 1] ?? height()];
    function rowAt(y) {
      let [low, high] = [0, tops().length];
      while (low < high) {
        const middle = (low + high) >> 1;
        if (tops()[middle] <= y) low = middle + 1;
        else high = middle;
      }
      const at = Math.max(0, low - 1);
      const [here, next] = ends(at);
      return at + (next > here ? Math.min(1, (y - here) / (next - here)) : 0);
    }
    function heightOf(row) {
      const at = Math.min(tops().length - 1, Math.floor(row));
      const [here, next] = ends(at);
      return here + (row - at) * (next - here);
    }
    graph.addEventListener("scroll", () => {
      if (!height()) return;
      if (!isOwn(graph) && isOn()) scrollTo(table, (rowAt((graph.scrollTop / span(graph)) * height()) / tops().length) * span(table));
      draw();
    });
    table.addEventListener("scroll", () => {
      if (!height()) return;
      if (isOwn(table)) return drawRows();
      scrollTo(graph, (heightOf((table.scrollTop / span(table)) * tops().length) / height()) * span(graph));
      draw();
    });
    return { scrollTo };
  };

  htp.overview = function (element, graph, { drawn, zoom, fill }) {
    const [paper, sight] = element.children;
    const scale = () => Math.min(0.25, element.clientHeight / drawn().root.height);
    function draw() {
      const { clientWidth: width, clientHeight: height } = element;
      if (!width || !height) return;
      Object.assign(paper, { width: width * devicePixelRatio, height: height * devicePixelRatio });
      const pen = paper.getContext("2d");
      pen.scale(devicePixelRatio, devicePixelRatio);
      const style = getComputedStyle(document.documentElement);
      const [ground, line, faint] = ["--raised", "--line", "--faint"].map((name) => style.getPropertyValue(name));
      const [x, y] = [width / drawn().root.width, scale()];
      for (const box of drawn().boxes) {
        pen.fillStyle = box.lines ? (box.depth % 2 ? ground : line) : fill(box.item) || faint;
        pen.fillRect(box.left * x, box.top * y, Math.max(1, box.width * x - 1), Math.max(0.5, box.height * y));
      }
    }
    function drawSight() {
      const [top, height] = [(graph.scrollTop / zoom()) * scale(), Math.max(8, (graph.clientHeight / zoom()) * scale())];
      Object.assign(sight.style, { top: `${Math.min(top, element.clientHeight - height)}px`, height: `${height}px` });
      element.setAttribute("aria-valuenow", Math.round((100 * graph.scrollTop) / span(graph)));
    }
    const goTo = (event) => (graph.scrollTop = ((event.clientY - element.getBoundingClientRect().top) / scale()) * zoom() - graph.clientHeight / 2);
    element.addEventListener("pointerdown", (event) => {
      element.setPointerCapture(event.pointerId);
      goTo(event);
    });
    element.addEventListener("pointermove", (event) => event.buttons && goTo(event));
    element.addEventListener("keydown", (event) => {
      const by = { ArrowDown: 40, ArrowUp: -40, PageDown: graph.clientHeight, PageUp: -graph.clientHeight, Home: -Infinity, End: Infinity }[event.key];
      if (by === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      graph.scrollTop = Math.max(0, Math.min(span(graph), graph.scrollTop + by));
    });
    return [draw, drawSight];
  };
})();
