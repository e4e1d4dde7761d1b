"use strict";
// Elements, and how numbers are written. What a page shows comes from a file that anybody may have made: it gets into the
// page as text only, through `make` and `textContent`, never as HTML.
const htp = (window.htp = {}); // a property, so that the frame of Model Explorer sees it

htp.make = function (tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "style") Object.assign(element.style, value);
    else if (name.includes("-") || name === "role") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
};

// Numbers that JSON has no sign for are written as words.
htp.number = (value) => (value === null || value === undefined ? null : Number(String(value).replace("inf", "Infinity")));

const SCALES = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];
htp.compact = function (value, unit = "") {
  if (value === null || value === undefined) return "";
  if (!Number.isFinite(value)) return String(value);
  if (unit === "B") return bytesText(value);
  const size = Math.abs(value);
  if (unit === "ms") return size === 0 ? "0" : size >= 100 ? value.toFixed(0) : size >= 1 ? value.toFixed(2) : value.toFixed(3);
  if (size !== 0 && size < 1e-3) return value.toExponential(1);
  const scale = SCALES.find(([limit]) => size >= limit);
  return scale ? `${trim(value / scale[0])}${scale[1]}` : trim(value);
};
function trim(value) {
  return Number.isInteger(value) ? String(value) : String(Number(value.toPrecision(3)));
}
htp.exact = (value, unit = "") =>
  value === null ? "" : `${value.toLocaleString("en", { maximumSignificantDigits: 12 })}${unit ? ` ${unit}` : ""}`;
htp.simple = (className) => className.slice(className.lastIndexOf(".") + 1);
// A long name without its middle: its end tells it from others.
htp.cut = function (name, most) {
  if (name.length <= most) return name;
  const end = Math.ceil((most - 1) * 0.6);
  return `${name.slice(0, most - 1 - end)}…${name.slice(-end)}`;
};
