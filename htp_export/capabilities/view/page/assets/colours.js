"use strict";
// Colours of modules and nodes: by class, or by any column, whatever result it comes from.
(function () {
  const isDark = () => document.documentElement.dataset.theme === "dark";
  const empty = () => (isDark() ? "#252a33" : "#eef0f4");
  const strange = () => (isDark() ? "#b3303e" : "#e5808a");
  const heated = (part) => {
    const heat = Math.min(1, Math.max(0, part));
    return isDark() ? `hsl(${225 - 205 * heat} 52% ${24 + 18 * heat}%)` : `hsl(${225 - 205 * heat} 76% ${90 - 26 * heat}%)`;
  };
  // Hues a golden angle apart, in the order in which the classes first occur: those of a file differ.
  const order = new Map([...new Set(htp.modules.map((module) => module.class))].map((name, k) => [name, k]));
  const hue = (place) => `hsl(${(210 + place * 137.5) % 360} ${isDark() ? "26% 31%" : "52% 86%"})`;
  const ofClass = (module) => hue(order.get(module.class));
  // Of words, such as precisions, too.
  function ofWord(column, item) {
    const word = htp.word(item, column);
    if (!word) return empty();
    const place = column.kinds.indexOf(word);
    return place < 0 ? strange() : hue(place);
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
  htp.colours = { empty, strange, heated, ofClass, ofWord, ofValue, options };
})();
