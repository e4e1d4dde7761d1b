"use strict";
// How the owners of nodes are known: the words of `htp.reason`, what they mean (docs/format.md), and their colours.
const REASONS = {
  scope: ["the module that ran when the work was captured", "#4353d4"],
  shared: ["several modules did the same work, merged into one node", "#0e9aa7"],
  fused: ["one node does a part of the work of several modules", "#9a5bd6"],
  flow: ["from what the neighbouring nodes read and make", "#d99a1c"],
  function: ["the function that the node calls", "#5a8f3c"],
  spliced: ["the module in whose place the node was put", "#b0588d"],
  parameters: ["the module that holds the parameters it reads", "#7b8794"],
  tensor: ["carried over: the tensor that it makes was there before", "#c96f2b"],
  node: ["carried over: its name is that of a node before", "#e0935a"],
  initializer: ["carried over: the weights that it reads", "#b7791f"],
  region: ["carried over: the tensors around it", "#8a6d3b"],
  values: ["carried over: it makes the values of a tensor that was there before", "#a0522d"],
  inserted: ["a tool put it there, and it serves these modules", "#5f9ea0"],
};

// A line on what a file knows about its tags: how many nodes by each word.
function tagsLine(make, title, { tags, reasons, untagged }) {
  const how = { htp: "owners known from", torch: "owners from torch's own scopes", none: "no module tags" }[tags];
  const parts = Object.entries(reasons).map(([word, count]) => [word, count, ...(REASONS[word] ?? ["", "#7b8794"])]);
  if (untagged && tags !== "none") parts.push(["no module", untagged, "nodes that belong to no module", "#c02637"]);
  const whole = parts.reduce((sum, [, count]) => sum + count, 0) || 1;
  const coloured = (element, colour, width = "") => Object.assign(element.style, { background: colour, width }) && element;
  const line = make("div", { className: "tags" }, make("span", { textContent: title ? `${title}: ${how}` : how[0].toUpperCase() + how.slice(1) }));
  if (parts.length) line.append(make("div", { className: "stack" }, ...parts.map(([, count, , colour]) => coloured(make("i"), colour, `${(100 * count) / whole}%`))));
  line.append(...parts.map(([word, count, meaning, colour]) => make("span", { className: "word", title: meaning }, coloured(make("i", { className: "dot" }), colour), `${word} ${count.toLocaleString("en")}`)));
  return line;
}
