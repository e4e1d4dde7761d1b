"use strict";
// Model Explorer's own application, in a frame that is given everything it asks for from here.
(function () {
  const pane = document.getElementById("explorer");
  const bar = document.getElementById("explorer-bar");
  const LARGE = 1500; // nodes and layers; from here on, laying them out at once takes long, and the page does not answer
  const PHONE = "@media (max-width: 700px) { info-panel, title-bar, legends-panel, snapshot-manager { display: none !important; } }";
  const packed = document.getElementById("explorer-application");
  const drawing = document.getElementById(`explorer-drawing-${htp.shown}`);
  let unpacked = null;
  let frame = null;

  // The places of modules and nodes, each with the layers that it lies in, the outermost first.
  function withLayers(drawn) {
    const known = new Map([["", []]]);
    const layers = (space) => {
      if (!known.has(space)) known.set(space, [...layers(space.slice(0, Math.max(space.lastIndexOf("/"), 0))), space + drawn.layer]);
      return known.get(space);
    };
    const modules = drawn.places.modules.map((space) => space && [space + drawn.layer, layers(space).slice(0, -1)]);
    return { ...drawn, places: { modules, nodes: drawn.places.nodes.map(([id, space]) => [id, layers(space)]) } };
  }

  // What Model Explorer's server answers; anything else is not found.
  function answers({ graphs, overlays }) {
    return {
      "/api/v1/get_extensions": () => [{ fileExts: ["json"], type: "adapter", id: "builtin_json", name: "JSON adapter", description: "" }],
      "/api/v1/check_new_version": () => ({ version: "", runningVersion: "", releaseUrl: "", desktopAppUrl: "" }),
      "/api/v1/notify_user_provided_model_path": () => ({ status: "ok" }),
      "/api/v1/load_graphs_json": () => graphs,
      "/api/v1/load_node_data": (query) => ({ content: JSON.stringify(overlays[Number(query.get("node_data_index"))].data) }),
    };
  }

  function address({ overlays, label }, chosen) {
    const asked = {
      models: [{ url: `graphs://${label}/0` }],
      nodeData: overlays.map((overlay, k) => `node_data://${overlay.name}/${k}`),
      nodeDataTargets: overlays.map(() => ""),
    };
    if (chosen) asked.uiState = { paneStates: [{ deepestExpandedGroupNodeIds: chosen.layers, selectedNodeId: chosen.id, selectedGraphId: chosen.graph, selectedCollectionLabel: chosen.collection, widthFraction: 1 }] };
    return `?data=${encodeURIComponent(JSON.stringify(asked))}`;
  }

  // How Model Explorer names a module or a node.
  function chosenIn({ places, graph, collection }, item) {
    if (!item) return null;
    if (item.kind === "fold") item = item.members[0];
    const [id, layers] = (item.kind === "node" ? places.nodes : places.modules)[item.id] ?? [null];
    return id === null ? null : { id, layers, graph, collection };
  }

  // What is drawn when so many levels of layers are open: a node or a closed layer each.
  function levels({ places }) {
    const layers = new Map();
    for (const [, path] of places.nodes) path.forEach((layer, depth) => layers.set(layer, depth));
    const depths = [...layers.values()];
    const deepest = Math.max(-1, ...depths) + 1;
    return Array.from({ length: deepest + 1 }, (_, level) => ({
      open: [...layers].filter(([, depth]) => depth < level).map(([layer]) => layer),
      drawn: places.nodes.filter(([, path]) => path.length <= level).length + depths.filter((depth) => depth <= level).length,
    }));
  }

  async function drawBar() {
    const drawn = (await unpacked)[1];
    const found = levels(drawn);
    bar.hidden = found.length < 2;
    bar.replaceChildren("Open levels", ...found.map(({ open: layers, drawn: count }, level) => {
      const button = htp.make("button", { textContent: level === found.length - 1 ? `${level}, all` : level, title: `${count.toLocaleString("en")} nodes and layers`, className: count > LARGE ? "many" : "" });
      button.onclick = () => asked(count, () => open(null, { id: "", layers, graph: drawn.graph, collection: drawn.collection }));
      return button;
    }));
  }

  // Ask before what would not answer for long.
  function asked(count, go) {
    if (count <= LARGE) return void go();
    const close = (then) => () => (dialog.remove(), then?.());
    const button = (text, then) => Object.assign(htp.make("button", { textContent: text }), { onclick: close(then) });
    const dialog = htp.make("div", { className: "ask", role: "alertdialog", "aria-label": "Open all layers?" },
      htp.make("p", { textContent: `This lays out ${count.toLocaleString("en")} nodes and layers at once. It can take minutes, in which the page does not answer. The levels above open the graph step by step.` }),
      button("Do not open"), button("Open all the same", go));
    pane.querySelector(".ask")?.remove();
    pane.append(dialog);
    dialog.querySelector("button").focus();
  }

  async function open(item = null, layersOpen = null) {
    if (!packed) return missing();
    delete pane.dataset.ready;
    pane.replaceChildren(htp.make("p", { className: "missing", textContent: "Opening Model Explorer …" }));
    await new Promise((then) => setTimeout(then, 30));
    unpacked ??= Promise.all([htp.unpacked(packed), htp.unpacked(drawing).then(withLayers)]);
    const [application, drawn] = await unpacked;
    drawBar();
    const dark = document.documentElement.dataset.theme === "dark";
    frame = htp.make("iframe", { title: "Model Explorer" });
    // The frame has this page's origin and policy: nothing is fetched, and only scripts from here run.
    htp.frame = { files: application.files, answers: answers(drawn), search: address(drawn, layersOpen ?? chosenIn(drawn, item)), settings: application.settings, theme: dark ? "dark" : "light" };
    const script = (text, type) => `<script type="${type}" src="${URL.createObjectURL(new Blob([text], { type: "text/javascript" }))}"></` + "script>";
    const { prelude, polyfills, main, style } = application;
    const css = `<link rel="stylesheet" href="${URL.createObjectURL(new Blob([style, PHONE], { type: "text/css" }))}">`;
    frame.srcdoc = `<!doctype html><html lang="en"><head><meta charset="utf-8"><base href="/">${css}</head><body data-metheme="${htp.frame.theme}"><app-root></app-root>`
      + `${script(prelude, "text/javascript")}${script(polyfills, "module")}${script(main, "module")}</body></html>`;
    pane.replaceChildren(frame);
  }

  function missing() {
    pane.replaceChildren(htp.make("div", { className: "missing" },
      htp.make("h2", { textContent: "Model Explorer is not in this page" }),
      htp.make("p", { textContent: htp.data.missing_explorer })));
  }

  // What is selected in it is shown beside it.
  window.addEventListener("message", async (event) => {
    if (!frame || event.source !== frame.contentWindow || !unpacked) return;
    if (event.data?.cmd === "model-explorer-ready") pane.dataset.ready = "yes";
    if (event.data?.cmd !== "model-explorer-node-selected") return;
    const { places } = (await unpacked)[1];
    const at = (list) => list.findIndex((place) => place && place[0] === event.data.nodeId);
    const [node, module] = [at(places.nodes), at(places.modules)];
    if (node >= 0) htp.select(htp.nodes[node], "explorer");
    else if (module >= 0) htp.select(htp.modules[module], "explorer");
  });

  // Select in it what is selected beside it; its layers open.
  async function point(item) {
    const chosen = unpacked && chosenIn((await unpacked)[1], item);
    if (chosen) frame?.contentWindow?.postMessage({ cmd: "model-explorer-select-node-by-node-id", nodeId: chosen.id }, "*");
  }

  const ownerOf = (node) => htp.byPath.get(node.owners[0]) ?? htp.root;
  const inside = (module) => [...module.children.filter((child) => child.nodes), ...module.own];
  function step(key) {
    const item = htp.selected?.kind === "fold" ? htp.selected.members[0] : htp.selected ?? htp.root;
    const above = item.kind === "node" ? ownerOf(item) : item.above;
    const siblings = above ? inside(above) : [item];
    const at = siblings.indexOf(item);
    const next = { ArrowDown: () => (item.kind === "module" ? inside(item)[0] : null), ArrowUp: () => above, ArrowRight: () => siblings[at + 1], ArrowLeft: () => siblings[at - 1] }[key];
    if (!next) return false;
    const to = next();
    if (to) {
      htp.select(to, "explorer");
      point(to);
    }
    return true;
  }

  let shown = null;
  htp.listeners.push((item) => (shown = item === htp.root ? null : item));
  htp.explorer = {
    available: Boolean(packed),
    open: () => (pane.childElementCount ? shown && point(shown) : open(shown)),
    // It has colours of its own, from when it was opened.
    restyle() {
      if (frame) pane.offsetParent ? open(shown) : pane.replaceChildren();
    },
    // What the frame asks: see frame.js.
    key: step,
    openAll(go) {
      const count = htp.nodes.length;
      if (count > LARGE) asked(count, go);
      return count <= LARGE;
    },
    show(item) {
      htp.tab("explorer");
      htp.select(item);
      return open(item);
    },
  };
})();
