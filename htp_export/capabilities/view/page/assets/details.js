"use strict";
// What is known of the module or node that is selected.
(function () {
  const panel = document.getElementById("detail");
  const MOST = 40;

  const section = (title, ...children) => [htp.make("h3", { textContent: title }), ...children];
  const tile = (value, title, exact = "") => htp.make("div", { className: "tile", title: exact }, htp.make("b", { textContent: value }), htp.make("span", { textContent: title }));
  const titled = (column, value) => [column.title, htp.share(value, column)].filter(Boolean).join(", ");
  const pair = (name, value) => [htp.make("dt", { textContent: name }), htp.make("dd", {}, value)];

  // A dotted name, which may be broken after its dots.
  function dotted(tag, className, text) {
    const parts = text.split(/(?<=\.)/).flatMap((part) => [part, htp.make("wbr")]);
    return htp.make(tag, { className }, ...parts);
  }

  function link(item, text = htp.title(item)) {
    const anchor = htp.make("a", { className: "path", textContent: text, tabIndex: 0, role: "button" });
    anchor.onclick = () => htp.select(item);
    anchor.onkeydown = (event) => event.key === "Enter" && htp.select(item);
    return anchor;
  }

  function modulePath(path) {
    const module = htp.byPath.get(path);
    return module ? link(module) : htp.make("span", { className: "path", textContent: path || "(root)" });
  }

  function some(items, draw) {
    const drawn = items.slice(0, MOST).map(draw);
    if (items.length > MOST) drawn.push(htp.make("div", { className: "more", textContent: `and ${items.length - MOST} more` }));
    return drawn;
  }

  function tensor([name, type], node = null, around = null) {
    const shown = node ? link(node, name || "(no name)") : htp.make("span", { className: "path", textContent: name || "(no name)" });
    const others = (htp.readersOf.get(name) ?? []).filter((module) => around && module !== around);
    const recipe = node ? undefined : htp.data.recipes[name];
    return htp.make("div", { className: "tensor" }, recipe ? htp.make("b", { className: "path", textContent: recipe }) : null, recipe ? htp.make("span", { className: "type" }, "stored as ", shown) : shown, htp.make("span", { className: "type", textContent: type || "type not known" }),
      ...(node ? [statistics(name)] : [values(name), statistics(name), asking(name)]),
      others.length ? htp.make("span", { className: "type" }, "also read by ", ...some(others, (module) => htp.make("span", {}, link(module), " "))) : null);
  }

  function values(name) {
    const said = htp.data.values[name];
    return said === undefined ? null : htp.make("code", { className: "value", textContent: said });
  }

  // A page that is served asks for the values of a tensor that the file stores.
  const entering = new Set(htp.data.inputs.map(([name]) => name));
  function asking(name) {
    if (!document.documentElement.dataset.served || !htp.data.types[name] || entering.has(name)) return null;
    const place = htp.make("div", {});
    const button = htp.make("button", { textContent: "Values and histogram" });
    button.onclick = async () => {
      button.disabled = true;
      try {
        const answer = await fetch(`tensor?name=${encodeURIComponent(name)}`);
        place.replaceChildren(...(answer.ok ? histogram(await answer.json()) : ["the file does not store it"]));
      } catch {
        place.replaceChildren("the server does not answer");
      }
    };
    place.append(button);
    return place;
  }
  function histogram({ problem, values: first, counts, edges, counted, not_finite: strange }) {
    if (problem) return [problem];
    const most = Math.max(1, ...counts);
    const bars = counts.map((count, k) => htp.make("i", { style: { height: `${(100 * count) / most}%` }, title: `${htp.compact(edges[k])} to ${htp.compact(edges[k + 1])}: ${count.toLocaleString("en")}` }));
    const range = edges.length ? `${htp.compact(edges[0])} to ${htp.compact(edges.at(-1))}, ` : "";
    const said = `${range}${counted.toLocaleString("en")} elements${strange ? `, ${strange.toLocaleString("en")} not finite` : ""}`;
    const begins = first.map((value) => htp.compact(htp.number(value))).join(", ");
    return [htp.make("div", { className: "bars", role: "img", "aria-label": `Histogram: ${said}` }, ...bars), htp.make("span", { className: "type", textContent: said }), htp.make("code", { className: "value", textContent: begins })];
  }

  // What the values of a weight are like, where the page was written with --weights.
  function statistics(name) {
    const found = htp.data.statistics[name];
    if (!found) return null;
    const { mean, std, least, most, zeros, elements, not_finite } = found;
    const said = [`mean ${htp.compact(mean)}`, `std ${htp.compact(std)}`, `${htp.compact(least)} to ${htp.compact(most)}`, `${elements ? trim((100 * zeros) / elements) : 0} % zeros`];
    if (not_finite) said.push(`${not_finite.toLocaleString("en")} not finite`);
    return htp.make("span", { className: `type statistics${not_finite ? " failure" : ""}`, textContent: said.join(" · ") });
  }

  function bars(counts) {
    const entries = Object.entries(counts);
    const most = Math.max(1, ...entries.map(([, count]) => count));
    return htp.make("div", { className: "ops" }, ...some(entries, ([name, count]) => [
      htp.make("span", { textContent: name }), htp.make("i", { style: { width: `${(100 * count) / most}%` } }), htp.make("span", { textContent: count }),
    ]).flat());
  }

  function evidence(found) {
    return htp.make("dl", {}, ...found.flatMap(([text, count, words]) => pair(`${count.toLocaleString("en")} ${text}`, explained(words)[0])));
  }

  // A button that copies a text. A page in a frame may not use the clipboard: there, the text is selected and copied.
  htp.copier = function (text, label) {
    const button = htp.make("button", { textContent: label, title: text });
    button.onclick = async () => {
      try {
        await navigator.clipboard.writeText(text);
      } catch {
        const field = htp.make("textarea", { value: text, className: "said" });
        document.body.append(field);
        field.select();
        document.execCommand("copy");
        field.remove();
      }
      button.textContent = "Copied";
      setTimeout(() => (button.textContent = label), 1500);
    };
    return button;
  };

  // The selector of modules, and commands on them, as a POSIX shell reads them: names of modules come from the file.
  const quoted = (word) => (/^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", `'"'"'`)}'`);
  const command = (...words) => ["htp-export", ...words].map(quoted).join(" ");
  function commands(modules) {
    const { file } = htp.data;
    const selector = htp.selector(modules);
    const { path } = modules[0];
    if (!file) return [];
    const isPlain = modules.length === 1 && path && !path.startsWith("-") && !/\p{C}/u.test(path);
    return [
      ...(isPlain ? [command("extract", file, path, "-o", `${path.replace(/[^\w.-]/g, "_")}.onnx`)] : []),
      command("tree", file, "--select", selector),
      command("nodes", file, "--select", selector),
      command("functions", file, selector, "-o", "functions.onnx"),
      command("quantize", file, "--rule", `${selector}=int8`, "-o", "int8.onnx"),
    ];
  }
  // A line of a shell, which is broken between its words.
  const shown = (line, ...before) => htp.make("div", { className: "command" }, ...before, htp.make("code", {}, ...line.split(" ").flatMap((word, k) => [k ? " " : "", htp.make("span", { textContent: word })])), htp.copier(line, "Copy"));
  function copying(modules) {
    const lines = commands(modules).map((line) => shown(line));
    const menu = lines.length ? htp.make("details", {}, htp.make("summary", { textContent: "Copy command" }), ...lines) : null;
    return [htp.copier(htp.selector(modules), "Copy selector"), menu];
  }
  // What measures what the page does not have.
  function offer() {
    return htp.data.offer ? htp.make("div", { className: "offer" }, shown(htp.data.offer, "No times are in this page. This measures them:")) : null;
  }

  function inExplorer(item) {
    if (!htp.explorer?.available || (item.kind === "module" && !item.nodes)) return null;
    const button = htp.make("button", { textContent: "Show in Model Explorer" });
    button.onclick = () => htp.explorer.show(item);
    return button;
  }

  // Several modules that are drawn as one: what they have in common, and each with its own numbers.
  function ofFold(fold) {
    const [first] = fold.members;
    const measures = htp.columns.map((column) => [column, htp.value(fold, column)]).filter(([column, value]) => value !== null && (column.main || column.key === "weight_bytes"));
    const differing = measures.map(([column]) => column).filter((column) => new Set(fold.members.map(column.of)).size > 1);
    return [
      dotted("h2", "path", `${first.path} … ${fold.members.at(-1).path}`),
      dotted("p", "kind", `${fold.members.length} modules that are alike: ${first.class || "class not known"}`),
      htp.make("div", { className: "tiles" }, ...measures.map(([column, value]) => tile(htp.withUnit(value, column), `${titled(column, value)}${differing.includes(column) ? (column.additive ? ", mean" : ", largest") : " of each"}`, htp.exact(value, column.unit)))),
      htp.make("div", { className: "tools" }, ...copying(fold.members), inExplorer(fold)),
      htp.make("dl", {}, ...pair("fate", `${first.fate}: ${htp.FATES[first.fate]?.meaning ?? ""}`), ...pair("calls", String(first.calls))),
      ...differing.flatMap((column) => section(`${column.title} of each`, each(fold.members, column))),
      ...(differing.length ? [] : section("Modules", ...some(fold.members, (member) => htp.make("div", { className: "tensor" }, link(member))))),
      ...(first.nodes ? section("Operators of each", bars(first.operators)) : []),
    ];
  }

  function each(members, column) {
    const most = Math.max(0, ...members.map(column.of).filter(Number.isFinite));
    const labels = new Map(htp.labels(members).map((label, k) => [members[k], label]));
    return htp.make("div", { className: "ops" }, ...some(members, (member) => {
      const value = column.of(member);
      return [link(member, labels.get(member)), htp.make("i", { style: { width: `${Number.isFinite(value) && most ? (100 * value) / most : 0}%` } }), htp.make("span", { textContent: htp.withUnit(value, column), title: htp.exact(value, column.unit) })];
    }).flat());
  }

  function ofModule(module) {
    const measures = htp.columns.map((column) => [column, column.of(module)]).filter(([, value]) => value !== null);
    const lesser = measures.filter(([column, value]) => !column.main && column.key !== "weight_bytes" && value !== 0);
    const tiles = measures.filter(([column]) => column.main || column.key === "weight_bytes");
    const several = module.evidence.some(([, , words]) => words.some((word) => word !== "scope"));
    const many = module.own.filter((node) => node.owners.length > 1);
    return [
      dotted("h2", "path", module.path || "(root)"),
      dotted("p", "kind", module.class || "class not known"),
      module.failure ? htp.make("pre", { className: "failure", textContent: module.failure }) : null,
      htp.make("div", { className: "tiles" }, ...tiles.map(([column, value]) => tile(htp.withUnit(value, column), titled(column, value), htp.exact(value, column.unit)))),
      htp.make("div", { className: "tools" }, ...copying([module]), inExplorer(module)),
      module === htp.root ? offer() : null,
      htp.make("dl", {},
        ...pair("fate", `${module.fate}: ${htp.FATES[module.fate]?.meaning ?? ""}`),
        ...(module.with.length ? pair("merged with", htp.make("span", {}, ...module.with.flatMap((path) => [modulePath(path), " "]))) : []),
        ...pair("calls", String(module.calls)),
        ...Object.entries(module.tied).flatMap(([name, first]) => pair("tied", tie(name, first))),
        ...(module.shared ? pair("shared nodes", String(module.shared)) : []),
        ...(module.fused ? pair("fused nodes", String(module.fused)) : []),
        ...htp.columns.flatMap((column) => (column.words?.[module.id] ? pair(column.title, column.words[module.id]) : [])),
        ...lesser.flatMap(([column, value]) => pair(column.title, htp.withUnit(value, column))),
        ...(module.source ? pair("source", place(module.source)) : [])),
      ...(module.nodes ? section("Operators", bars(module.operators)) : []),
      ...(module.inputs.length ? section("Inputs", ...some(module.inputs, (each) => tensor(each))) : []),
      ...(module.outputs.length ? section("Outputs", ...some(module.outputs, (each) => tensor(each))) : []),
      ...(module.weights.length ? section("Weights that it reads itself", ...some(module.weights, (each) => tensor(each, null, module))) : []),
      ...(many.length ? section("Nodes with several owners", ...some(many, (node) => htp.make("div", { className: "tensor" }, link(node, `${node.op} ${node.name}`), htp.make("span", { className: "type", textContent: node.owners.map((path) => path || "(root)").join(", ") })))) : []),
      ...(several ? section("How the owners are known", evidence(module.evidence)) : []),
    ];
  }

  // A parameter that a module before this one holds, too: it is stored, and counted in the whole, once.
  function tie(name, first) {
    const at = first.lastIndexOf(".");
    return htp.make("span", {}, htp.make("span", { className: "path", textContent: name }), " is ", htp.make("span", { className: "path", textContent: first.slice(at + 1) }), " of ", modulePath(first.slice(0, Math.max(0, at))), ", and counts once in what holds both");
  }

  function ofNode(node) {
    const measures = htp.columns.filter((column) => htp.value(node, column) !== null);
    const readers = htp.nodes.filter((other) => other.inputs.some(([, from]) => from === node.id));
    const attributes = Object.entries(node.attributes);
    return [
      htp.make("h2", { textContent: node.op }),
      htp.make("p", { className: "kind path", textContent: node.name }),
      measures.length ? htp.make("div", { className: "tiles" }, ...measures.map((column) => nodeTile(node, column))) : null,
      htp.make("div", { className: "tools" }, inExplorer(node)),
      htp.make("dl", {},
        ...pair(node.owners.length > 1 ? "owners" : "owner", node.owners.length ? htp.make("span", {}, ...node.owners.map((path) => htp.make("div", {}, modulePath(path)))) : "none"),
        ...(node.reason ? pair("known by", `${node.reason}: ${htp.REASONS[node.reason]?.[0] ?? ""}`) : []),
        ...(node.call ? pair("call", `${node.call}, counted from 0`) : [])),
      ...(node.source ? section("Source", place(`${node.source[0]}:${node.source[1]} in ${node.source[2]}`), htp.make("pre", { textContent: node.source[3] })) : []),
      ...(node.inputs.length ? section("Inputs", ...some(node.inputs, ([name, from]) => tensor([name, from === null ? htp.data.types[name] ?? "" : typeOf(htp.nodes[from], name)], htp.nodes[from] ?? null))) : []),
      ...(node.outputs.length ? section("Outputs", ...some(node.outputs, (each) => tensor(each))) : []),
      ...(readers.length ? section("Read by", ...some(readers, (other) => htp.make("div", { className: "tensor" }, link(other, `${other.op} ${other.name}`)))) : []),
      ...(attributes.length ? section("Attributes", htp.make("dl", {}, ...attributes.flatMap(([name, value]) => pair(name, htp.make("code", { textContent: value }))))) : []),
    ];
  }

  function nodeTile(node, column) {
    const value = column.ofNode(node);
    const [sign, said] = column.isSaid(node) ? ["", ""] : ["≈ ", "an equal part of what its module has left"];
    return tile(sign + htp.withUnit(value, column), titled(column, value), [htp.exact(value, column.unit), said].filter(Boolean).join("\n"));
  }

  // A path is long; its end says which file it is.
  function place(source) {
    return htp.make("code", { textContent: source.split(/[\\/]/).slice(-2).join("/"), title: source });
  }

  function typeOf(node, name) {
    return node.outputs.find(([output]) => output === name)?.[1] ?? node.outputs[0]?.[1] ?? "";
  }

  htp.listeners.push((item) => {
    if (!item || item.kind === "loose") return;
    panel.replaceChildren(...{ node: ofNode, fold: ofFold, module: ofModule }[item.kind](item).filter(Boolean));
    panel.scrollTop = 0;
  });
})();
