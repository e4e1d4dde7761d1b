"use strict";
// A picture of what is seen of an element: as SVG, of its boxes, lines and texts as they are drawn, and of that as PNG.
htp.picture = (function () {
  const SCALE = 2; // pixels of a PNG for each of the screen
  const PAINT = ["fill", "stroke", "stroke-width", "stroke-dasharray"];

  const isClear = (colour) => colour === "transparent" || /(, 0\)|\/ 0\))$/.test(colour);

  function frame(style, rect) {
    const border = parseFloat(style.borderTopWidth) || 0;
    const [ground, line] = [style.backgroundColor, style.borderTopColor];
    if (isClear(ground) && (!border || isClear(line))) return [];
    const radius = Math.min(parseFloat(style.borderTopLeftRadius) || 0, rect.height / 2);
    const dashes = ["dashed", "dotted"].includes(style.borderTopStyle) ? { "stroke-dasharray": "3 2" } : {};
    const lined = border ? { stroke: line, "stroke-width": border, ...dashes } : {};
    return [htp.svg("rect", { x: rect.x, y: rect.y, width: rect.width, height: rect.height, rx: radius, fill: isClear(ground) ? "none" : ground, ...lined })];
  }

  function words(node, style, scale, origin) {
    if (!node.data.trim()) return [];
    const range = document.createRange();
    range.selectNodeContents(node);
    const rect = range.getBoundingClientRect();
    const text = htp.svg("text", {
      x: rect.x - origin.x, y: rect.y - origin.y + rect.height / 2, "dominant-baseline": "central", fill: style.color,
      "font-family": style.fontFamily, "font-size": parseFloat(style.fontSize) * scale, "font-weight": style.fontWeight,
    });
    text.textContent = node.data;
    return [text];
  }

  // Lines are copied with their colours, in the place where they are drawn.
  function lines(element, rect, scale) {
    const copy = element.cloneNode(true);
    const [originals, copies] = [element, copy].map((each) => each.querySelectorAll("path"));
    originals.forEach((path, k) => {
      const style = getComputedStyle(path);
      for (const name of PAINT) copies[k].setAttribute(name, style.getPropertyValue(name));
    });
    const [, top] = element.getAttribute("viewBox").split(" ");
    return htp.svg("g", { transform: `translate(${rect.x} ${rect.y}) scale(${scale}) translate(0 ${-top})` }, ...copy.childNodes);
  }

  function drawn(element, area, origin) {
    const style = getComputedStyle(element);
    const seen = element.getBoundingClientRect();
    // What has no height holds parts that lie elsewhere.
    if (style.display === "none" || !seen.width) return [];
    if (seen.height && (seen.right < area.left || seen.left > area.right || seen.bottom < area.top || seen.top > area.bottom)) return [];
    const rect = { x: seen.x - origin.x, y: seen.y - origin.y, width: seen.width, height: seen.height };
    if (element instanceof SVGElement) return [lines(element, rect, seen.width / element.width.baseVal.value)];
    const scale = element.offsetWidth ? seen.width / element.offsetWidth : 1;
    const inside = [...element.childNodes].flatMap((child) => (child.nodeType === Node.TEXT_NODE ? words(child, style, scale, origin) : child.nodeType === Node.ELEMENT_NODE ? drawn(child, area, origin) : []));
    if (style.overflow === "visible" || !inside.length) return [...frame(style, rect), ...inside];
    const { x, y, width, height } = rect;
    return [...frame(style, rect), htp.svg("svg", { x, y, width, height, viewBox: `${x} ${y} ${width} ${height}` }, ...inside)];
  }

  function svgOf(element) {
    const area = element.getBoundingClientRect();
    const { clientWidth: width, clientHeight: height } = element;
    return sheet(width, height, [...element.children].flatMap((child) => drawn(child, area, area)));
  }

  // Parts on the ground of the page, as the text of an SVG file.
  function sheet(width, height, parts) {
    const ground = htp.svg("rect", { width, height, fill: getComputedStyle(document.body).backgroundColor });
    return new XMLSerializer().serializeToString(htp.svg("svg", { width, height, viewBox: `0 0 ${width} ${height}` }, ground, ...parts));
  }

  async function pngOf(element) {
    const url = URL.createObjectURL(new Blob([svgOf(element)], { type: "image/svg+xml" }));
    const image = new Image();
    image.src = url;
    await image.decode();
    const paper = htp.make("canvas", { width: image.width * SCALE, height: image.height * SCALE });
    paper.getContext("2d").drawImage(image, 0, 0, paper.width, paper.height);
    URL.revokeObjectURL(url);
    return new Promise((done) => paper.toBlob(done, "image/png"));
  }

  function save(blob, name) {
    const link = htp.make("a", { href: URL.createObjectURL(blob), download: name.replace(/[^\w.-]+/g, "_") });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }
  const saveSvg = (element, name) => save(new Blob([svgOf(element)], { type: "image/svg+xml" }), `${name}.svg`);
  const savePng = async (element, name) => save(await pngOf(element), `${name}.png`);
  return { svgOf, sheet, pngOf, save, saveSvg, savePng };
})();
