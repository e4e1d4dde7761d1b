"use strict";
// Runs before Model Explorer's application, in its frame: what it would ask a server for, it gets from the page.
(function () {
  const { files, answers, search, settings, theme } = parent.htp.frame;
  const nameOf = (url) => String(url?.url ?? url).replace(/^[a-z]+:\/\/[^/]*/, "").replace(/^\//, "").replace(/[?#].*$/, "");
  const blobOf = (file) => new Blob([file.base64 === undefined ? file.text : Uint8Array.from(atob(file.base64), (letter) => letter.charCodeAt(0))], { type: file.type });
  const urls = new Map();
  const urlOf = (name) => {
    if (!urls.has(name)) urls.set(name, URL.createObjectURL(blobOf(files[name])));
    return urls.get(name);
  };

  window.fetch = async function (asked) {
    const name = nameOf(asked);
    if (files[name]) return new Response(blobOf(files[name]), { headers: { "Content-Type": files[name].type } });
    const answer = answers[`/${name}`];
    const query = new URLSearchParams(String(asked?.url ?? asked).split("?")[1] ?? "");
    return answer ? Response.json(answer(query)) : new Response("not in this page", { status: 404 });
  };

  const native = Object.getOwnPropertyDescriptor(HTMLImageElement.prototype, "src");
  Object.defineProperty(HTMLImageElement.prototype, "src", {
    ...native,
    set(url) {
      native.set.call(this, files[nameOf(url)] ? urlOf(nameOf(url)) : url);
    },
  });

  // As long as the frame has no size, the application zooms to nothing, which no browser can draw.
  SVGGElement.prototype.setAttribute = function (name, value) {
    if (name !== "transform" || !String(value).includes("NaN")) Element.prototype.setAttribute.call(this, name, value);
  };

  const NativeWorker = window.Worker;
  window.Worker = function (url, options) {
    const name = Object.keys(files).find((each) => nameOf(url).endsWith(each));
    return new NativeWorker(urlOf(name), options);
  };

  window.EventSource = function () {
    return { addEventListener() {}, close() {} };
  };

  // A page in a frame has no address that could be read or changed.
  const address = { href: `https://model.invalid/${search}`, search, pathname: "/", hash: "", protocol: "https:", hostname: "model.invalid", host: "model.invalid", port: "", origin: "https://model.invalid", reload() {}, assign() {}, toString: () => address.href };
  const go = (state, _, url) => {
    history.state = state;
    if (url) address.search = String(url).includes("?") ? `?${String(url).split("?")[1]}` : "";
  };
  const history = { state: null, length: 1, pushState: go, replaceState: go, back() {}, forward() {}, go() {} };
  window.htpLocation = address;
  window.htpHistory = history;

  // Opening every layer of a large model at once is asked about first.
  let allowed = false;
  document.addEventListener("click", (event) => {
    const button = event.target.closest?.(".expand-all");
    if (!button || allowed) return;
    const go = () => {
      allowed = true;
      button.click();
      allowed = false;
    };
    if (parent.htp.explorer.openAll(go)) return;
    event.stopImmediatePropagation();
    event.preventDefault();
  }, true);
  // Arrows go through the modules.
  document.addEventListener("keydown", (event) => {
    const other = event.ctrlKey || event.metaKey || event.altKey || event.target.closest?.("input, textarea, select, [role=menu], [role=listbox]");
    if (other || !event.key.startsWith("Arrow") || !parent.htp.explorer.key(event.key)) return;
    event.stopImmediatePropagation();
    event.preventDefault();
  }, true);

  const kept = new Map(Object.entries({ ...settings, model_explorer_theme: theme }));
  const storage = { getItem: (key) => kept.get(key) ?? null, setItem: (key, value) => void kept.set(key, String(value)), removeItem: (key) => void kept.delete(key), clear: () => kept.clear() };
  Object.defineProperty(window, "localStorage", { value: storage });
})();
