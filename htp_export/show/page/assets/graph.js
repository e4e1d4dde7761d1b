"use strict";
// The interactive graph: Model Explorer's own application, in a frame that is given everything it asks for from here.
(function () {
  const pane = document.getElementById("graph");
  const packed = document.getElementById("graph-application");
  const drawing = document.getElementById("graph-drawing");
  let unpacked = null;
  let frame = null;

  async function inflate(element) {
    const bytes = Uint8Array.from(atob(element.textContent.trim()), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return JSON.parse(await new Response(stream).text());
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

  // How the graph names a module or a node.
  function chosenIn({ places, graph, collection }, item) {
    if (!item) return null;
    const [id, layers] = (item.kind === "node" ? places.nodes : places.modules)[item.id] ?? [null];
    return id === null ? null : { id, layers, graph, collection };
  }

  async function open(item = null) {
    if (!packed) return missing();
    pane.replaceChildren(htp.make("p", { className: "missing", textContent: "Opening the graph …" }));
    await new Promise((then) => setTimeout(then, 30));
    unpacked ??= Promise.all([inflate(packed), inflate(drawing)]);
    const [application, drawn] = await unpacked;
    const dark = document.documentElement.dataset.theme === "dark";
    frame = htp.make("iframe", { title: "Model Explorer" });
    // The frame has this page's origin and policy: nothing is fetched, and only scripts from here run.
    htp.frame = { files: application.files, answers: answers(drawn), search: address(drawn, chosenIn(drawn, item)), settings: application.settings, theme: dark ? "dark" : "light" };
    const script = (text, type) => `<script type="${type}" src="${URL.createObjectURL(new Blob([text], { type: "text/javascript" }))}"></` + "script>";
    const { prelude, polyfills, main, style } = application;
    const css = `<link rel="stylesheet" href="${URL.createObjectURL(new Blob([style], { type: "text/css" }))}">`;
    frame.srcdoc = `<!doctype html><html lang="en"><head><meta charset="utf-8"><base href="/">${css}</head><body data-metheme="${htp.frame.theme}"><app-root></app-root>`
      + `${script(prelude, "text/javascript")}${script(polyfills, "module")}${script(main, "module")}</body></html>`;
    pane.replaceChildren(frame);
  }

  function missing() {
    pane.replaceChildren(htp.make("div", { className: "missing" },
      htp.make("h2", { textContent: "No graph in this page" }),
      htp.make("p", { textContent: htp.data.missing_graph })));
  }

  // What is selected in the graph is shown beside it.
  window.addEventListener("message", async (event) => {
    if (!frame || event.source !== frame.contentWindow || !unpacked) return;
    if (event.data?.cmd === "model-explorer-ready") pane.dataset.ready = "yes";
    if (event.data?.cmd !== "model-explorer-node-selected") return;
    const { places } = (await unpacked)[1];
    const at = (list) => list.findIndex((place) => place && place[0] === event.data.nodeId);
    const [node, module] = [at(places.nodes), at(places.modules)];
    if (node >= 0) htp.select(htp.nodes[node], "graph");
    else if (module >= 0) htp.select(htp.modules[module], "graph");
  });

  htp.graph = {
    available: Boolean(packed),
    open: () => (pane.childElementCount ? null : open()),
    show(item) {
      htp.tab("graph");
      htp.select(item);
      return open(item);
    },
  };
})();
