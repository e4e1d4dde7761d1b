"use strict";
// Search and selectors: what stands in the search field, and selectors to copy. A selector means what it means in
// htp_export/format/selectors.py; other words are looked for.
(function () {
  const BRACKETS = "\\[!?\\]?[^\\]]*\\]";
  const literal = (text) => text.replace(/[\\^$.*+?()[\]{}|\/]/g, "\\$&");
  // A glob as a regular expression. On paths, which are written with a dot before each part, it stays within a part.
  function globbed(text, isPath) {
    return text.match(new RegExp(`${BRACKETS}|\\*+|.`, "gsu"))?.map((token) => {
      if (token[0] === "*") return isPath ? "[^.]*" : ".*";
      if (token === "?") return isPath ? "[^.]" : ".";
      if ([...token].length === 1) return literal(token);
      const inside = token.slice(1, -1).replace(/^!/, "").replace(/[\\[\]]/g, "\\$&");
      const not = token[1] === "!" ? "^" : "";
      return `${isPath ? "(?!\\.)" : ""}[${not}${isPath || not ? inside : inside.replace(/^\^/, "\\^")}]`;
    }).join("") ?? "";
  }
  function pathGlob(text) {
    if (text === ".") return "";
    const parts = `.${text}`.match(new RegExp(`\\.(?:${BRACKETS}|[^.])*`, "gsu")).map((part) => part.slice(1));
    if (parts.includes("")) throw new SyntaxError("a part between two dots is empty");
    return parts.map((part) => (part === "**" ? "(?:\\.[^.]+)*" : `\\.${numbers(part) ?? globbed(part, true)}`)).join("");
  }
  // A range of numbers, as 0-19, as a regular expression of each of them, and of the range as it is written.
  const RANGE = /^(\d{1,18})-(\d{1,18})$/;
  const MOST_NUMBERS = 10000; // longer than any list of modules
  function numbers(part) {
    const [, first, last] = (part.match(RANGE) ?? []).map(Number);
    if (!(last - first >= 0 && last - first < MOST_NUMBERS)) return null;
    return `(?:${literal(part)}|${Array.from({ length: last - first + 1 }, (_, k) => first + k).join("|")})`;
  }
  const hasRange = (word) => word.split(".").some((part) => RANGE.test(part));
  const whole = (source, flags = "su") => new RegExp(`^(?:${source})$`, flags);

  // What a word says of a module and of a node itself; `text` is what is marked in names.
  function term(word, paths) {
    const [, field, value] = word.match(/^(class|op|fate|reason|re):(.+)$/s) ?? [null, "", word];
    if (field === "re") {
      const regex = whole(value.replaceAll("(?P<", "(?<"), "");
      return { module: ({ path }) => regex.test(path) };
    }
    if (field === "class") {
      const regex = whole(globbed(value, false));
      return { module: (module) => regex.test(module.class) || regex.test(htp.simple(module.class)), text: value };
    }
    if (field) {
      const regex = whole(globbed(value, false), "sui");
      if (field === "fate") return { module: ({ fate }) => regex.test(fate) };
      return { node: (node) => regex.test(node[field]) || regex.test(node[field].split("::").at(-1)), text: value };
    }
    if (word === "." || /[*?]|\[.*\]/s.test(word) || paths.has(word) || hasRange(word)) {
      const regex = whole(paths.has(word) && hasRange(word) ? literal(`.${word}`) : pathGlob(word));
      return { module: ({ path }) => regex.test(path && `.${path}`), text: word };
    }
    const text = word.toLowerCase();
    const has = (...said) => said.join("\n").toLowerCase().includes(text);
    return { module: (module) => has(module.path, module.class) || tiedOf(module).some((name) => htp.isNamed(name, text)), node: (node) => has(node.name, node.op) || tensorsOf(node).some((name) => htp.isNamed(name, text)), text };
  }
  // The full names of a module's parameters that are stored under another name.
  const tiedOf = ({ path, tied = {} }) => Object.keys(tied).map((name) => (path && !name.startsWith(`${path}.`) ? `${path}.${name}` : name));
  // The names of a node's tensors: those that it computes, the inputs of the model and the weights that it reads, and the
  // parameters that these were computed of.
  function tensorsOf(node) {
    const read = node.inputs.filter(([, from]) => from === null).map(([name]) => name);
    return [...node.outputs.map(([name]) => name), ...read, ...read.map((name) => htp.data.recipes[name] ?? "")];
  }
  // Whether a word is the name of a tensor or its beginning, down to its last part at least, or this part alone:
  // "layer.0.fc.weight" is found by "fc.weight", and not by every word that its module is found by.
  htp.isNamed = function (name, text) {
    const lower = name.toLowerCase();
    return lower.endsWith(`.${text}`) || (lower.startsWith(text) && text.length > lower.split(",")[0].lastIndexOf("."));
  };

  // The modules and nodes that are meant: commas separate alternatives, spaces what must all hold, `!` excludes. A node has
  // what its modules have, too, but not that alone. Throws a SyntaxError if a part cannot be read.
  htp.search = function (text, modules = htp.modules, nodes = htp.nodes) {
    const paths = new Map(modules.map((module) => [module.path, module]));
    const [alternatives, excluded] = [[[]], []];
    let rest = text;
    for (let found; (found = rest.match(new RegExp(`^\\s*(?:(,)|(!?)\\s*(re:.*|(?:${BRACKETS}|[^\\s,])+))`, "su"))); rest = rest.slice(found[0].length)) {
      const [, comma, not, word] = found;
      if (comma) alternatives.push([]);
      else (not ? excluded : alternatives.at(-1)).push(term(word.trim(), paths));
    }
    const wanted = alternatives.filter((terms) => terms.length);
    const terms = wanted.flat();
    if (!terms.length && !excluded.length) return null;
    const ofOwner = (each, node) => each.module && node.owners.some((path) => paths.has(path) && each.module(paths.get(path)));
    const holds = (each, item) => (item.kind === "node" ? each.node?.(item) || ofOwner(each, item) : each.module?.(item));
    const isMeant = (item) => !excluded.some((each) => holds(each, item)) && (terms.length
      ? wanted.some((all) => all.every((each) => holds(each, item)) && (item.kind !== "node" || all.some((each) => each.node?.(item))))
      : item.kind !== "node");
    return { hits: new Set([...modules, ...nodes].filter(isMeant)), words: terms.map((each) => each.text?.toLowerCase()).filter(Boolean) };
  };

  // The selector of some modules, which names no other one, not even those that are not drawn.
  const known = new Set(htp.modules.flatMap(({ path }) => path.split(".").map((_, k, parts) => parts.slice(0, k + 1).join("."))));
  const all = [...known].map((path) => ({ path, class: "" }));
  htp.selector = function (modules) {
    const paths = modules.map((module) => module.path);
    if (!paths.every((path) => /^\w[\w.-]*$|^$/.test(path) && !hasRange(path))) return `re:${paths.map((path) => literal(path).replace(/[\p{C}\p{Z}]/gu, (sign) => `\\u${sign.charCodeAt(0).toString(16).padStart(4, "0")}`)).join("|")}`;
    const parts = paths.map((path) => path.split("."));
    const glob = parts[0].map((part, k) => (parts.every((each) => each[k] === part) ? part : "*")).join(".");
    const isExact = paths.length > 1 && htp.search(glob, all, []).hits.size === paths.length && parts.every((each) => each.length === parts[0].length);
    return isExact ? glob : paths.map((path) => path || ".").join(",");
  };
})();
