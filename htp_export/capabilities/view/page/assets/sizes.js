"use strict";
// Sizes as the terminal draws them (`si` in htp_export/results/columns.py): four digits and a prefix.
function bytesText(value) {
  let power = 0;
  let size = value;
  for (; Math.abs(size) >= 999.95 && power < 6; power++) size /= 1000;
  if (!power) return `${Math.round(value)} B`;
  return `${size.toFixed(Math.abs(size) < 9.9995 ? 3 : Math.abs(size) < 99.995 ? 2 : 1)} ${" kMGTPE"[power]}B`;
}
