"use strict";
// Colours of modules and nodes: by class, or by any column, whatever result it comes from.
(function () {
  const theme = () => (document.documentElement.dataset.theme === "dark" ? 1 : 0);
  const empty = () => ["#eef0f4", "#252a33"][theme()];
  const strange = () => ["#ff9aa5", "#8d1f30"][theme()];
  // From nothing to the most, lighter to darker or darker to lighter, so that the order is seen without hues.
  const HEAT = [[[255, 249, 224], [252, 200, 98], [236, 112, 60]], [[38, 36, 34], [94, 58, 24], [158, 60, 26]]];
  function heated(part) {
    const at = 2 * Math.min(1, Math.max(0, part));
    const [from, to] = HEAT[theme()].slice(at < 1 ? 0 : 1);
    return `rgb(${from.map((channel, k) => Math.round(channel + (to[k] - channel) * (at < 1 ? at : at - 1))).join(" ")})`;
  }

  // For the light and for the dark theme. Two of them differ, in OKLab, by 0.08, and for readers who do not see red, green or
  // blue by 0.05, where 0.02 is just seen; text on each has a contrast of 4.5 and more: tests/view/test_view_colours.py.
  const PALETTE = [
    ["#da7e7f", "#883438"], ["#eeabaa", "#5a2224"], ["#b5963a", "#4e3d06"], ["#c3c56b", "#626313"], ["#a6f594", "#0d3503"],
    ["#4aedd3", "#046054"], ["#a1cad8", "#56666c"], ["#43a1f9", "#145fa0"], ["#96aef7", "#243377"], ["#e2dffa", "#434154"],
    ["#a587d9", "#5c4581"], ["#cf9ac9", "#382036"],
  ];
  const SEED = 8471; // one of those for which the most frequent classes of torch.nn have different colours
  function hashed(name) {
    let hash = SEED;
    for (const letter of name) hash = Math.imul(hash ^ letter.codePointAt(0), 16777619);
    return (hash >>> 8) % PALETTE.length;
  }
  // Name → colour, by its hash, so that it is the same in every model. A name whose colour is taken has the next free one;
  // names that are `common` to models choose first. Of more names than colours, some share one, but none with those `near` it.
  function assigned(names, common = () => false, near = () => []) {
    const places = new Map();
    const taken = new Set();
    const ordered = [...names.filter(common), ...names.filter((name) => !common(name))].map(htp.simple);
    for (const name of new Set(ordered)) {
      const choices = PALETTE.map((_, k) => (hashed(name) + k) % PALETTE.length);
      const around = new Set(near(name).map((other) => places.get(other)));
      const place = choices.find((each) => !taken.has(each)) ?? choices.find((each) => !around.has(each)) ?? choices[0];
      places.set(name, place);
      taken.add(place);
    }
    return (name) => PALETTE[places.get(htp.simple(name))]?.[theme()];
  }
  // Classes of which there are several modules come first.
  const classes = htp.modules.filter((module) => module.above && (module.nodes || module.parameters)).map((module) => module.class).sort();
  const several = classes.filter((name, k) => name === classes[k + 1]);
  // The classes of the modules around and beside those of each class.
  const beside = new Map();
  function meet(one, other) {
    const [a, b] = [one, other].map((module) => htp.simple(module.class));
    if (a === b) return;
    for (const [name, neighbour] of [[a, b], [b, a]]) beside.set(name, (beside.get(name) ?? new Set()).add(neighbour));
  }
  for (const module of htp.modules) {
    const kinds = [...new Map(module.children.map((child) => [child.class, child])).values()];
    kinds.forEach((child, k) => [module, ...kinds.slice(k + 1)].forEach((other) => meet(child, other)));
  }
  const byClass = assigned([...new Set([...several, ...classes])], (name) => name.startsWith("torch."), (name) => [...(beside.get(name) ?? [])]);
  const ofClass = (module) => byClass(module.class) ?? empty();
  // Of words, such as precisions, too.
  for (const column of htp.columns) if (column.named) column.colour = assigned(column.kinds.sort());
  function ofWord(column, item) {
    const word = htp.word(item, column);
    return word ? column.colour(word) ?? strange() : empty();
  }

  // The colour of a value, where `most` is the largest that is drawn.
  function ofValue({ additive }, value, most) {
    if (value === null) return empty();
    if (!Number.isFinite(value)) return strange();
    if (additive) return heated(most ? Math.abs(value) / most : 0);
    // Errors span many powers of ten, and what is wanted is where they begin.
    return heated(value === 0 || !most ? 0 : 1 + Math.log10(Math.abs(value) / most) / 6);
  }

  const option = (value, textContent) => htp.make("option", { value, textContent });
  const options = () => [option("class", "class"), ...htp.columns.filter((column) => column.most > 0 || column.named).map((column) => option(column.key, column.title))];
  htp.colours = { PALETTE, assigned, empty, strange, heated, ofClass, ofWord, ofValue, options };
})();
