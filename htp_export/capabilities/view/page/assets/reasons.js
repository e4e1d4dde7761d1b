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

// How owners are known, at length, and the colour: of the words of `htp.reason` that one piece of evidence stands for.
function explained(words) {
  return [words.map((word) => REASONS[word]?.[0]).filter(Boolean).join("; "), REASONS[words[0]]?.[1] ?? "#7b8794"];
}

// A line on the module tags of a file: a sentence, and how the owners of how many nodes are known.
function tagsLine(make, title, { source, headline, untagged, evidence }) {
  const parts = evidence.map(([text, count, words]) => [`${count.toLocaleString("en")} ${text}`, count, ...explained(words)]);
  const bar = untagged && source !== "none" ? [...parts, [headline, untagged, "", "#c02637"]] : parts;
  const whole = bar.reduce((sum, [, count]) => sum + count, 0) || 1;
  const coloured = (element, colour, width = "") => Object.assign(element.style, { background: colour, width }) && element;
  const said = title ? `${title}: ${headline}` : headline[0].toUpperCase() + headline.slice(1);
  const line = make("div", { className: "tags" }, make("span", { textContent: said }));
  if (bar.length) line.append(make("div", { className: "stack" }, ...bar.map(([text, count, , colour]) => coloured(make("i", { title: text }), colour, `${(100 * count) / whole}%`))));
  line.append(...parts.map(([text, , meaning, colour]) => make("span", { className: "word", title: meaning }, coloured(make("i", { className: "dot" }), colour), text)));
  return line;
}
