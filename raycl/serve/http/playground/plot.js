// Lines over time as SVG. Names are untrusted text: they become text nodes, never markup.

import { shape, ticks } from "./svg.js";

const MARGIN = { top: 8, right: 8, bottom: 22, left: 46 };
const LETTER = 7.5; // pixels of one in a label, at most
const COLOURS = ["one", "two", "three", "four", "five", "six", "seven"].map((name) => `var(--${name})`);

export const MOST_LINES = COLOURS.length;

const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" });

/**
 * Draw lines; a value of null breaks a line.
 * @param {HTMLElement} box
 * @param {{name: string, values: (number | null)[]}[]} lines one value for each time
 * @param {number[]} times seconds since the epoch
 * @param {{unit?: string, top?: number, empty: string}} how the largest value shown; words where there is none
 */
export function plot(box, lines, times, { unit = "", top, empty }) {
  const [width, height] = [box.clientWidth, box.clientHeight];
  const values = lines.flatMap((line) => line.values).filter((value) => value !== null);
  const most = top ?? Math.max(1e-3, ...values) * 1.08;
  const least = Math.min(0, ...values) * 1.08;
  const marks = ticks(most - least).flatMap((value) => (value ? [-value, value] : [value])).filter((value) => least <= value && value <= most);
  const longest = Math.max(...marks.map((value) => `${shown(value)}${unit}`.length));
  const left = Math.max(MARGIN.left, 10 + LETTER * longest);
  const x = (place) => left + (place / Math.max(1, times.length - 1)) * (width - left - MARGIN.right);
  const y = (value) => height - MARGIN.bottom - ((value - least) / (most - least)) * (height - MARGIN.top - MARGIN.bottom);
  const now = lines.map((line) => `${line.name} ${shown(line.values.findLast((value) => value !== null) ?? 0)}${unit}`);
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": values.length ? `Newest: ${now.join(", ")}` : empty });
  for (const value of marks) {
    svg.append(shape("line", { class: "grid", x1: x(0), x2: x(times.length - 1), y1: y(value), y2: y(value) }));
    svg.append(shape("text", { x: x(0) - 6, y: y(value) + 4, "text-anchor": "end" }, `${shown(value)}${unit}`));
  }
  const middle = Math.floor((times.length - 1) / 2);
  for (const [place, anchor] of [[0, "start"], [middle, "middle"], [times.length - 1, "end"]]) {
    svg.append(shape("text", { x: x(place), y: height - 4, "text-anchor": anchor }, clock(times[place])));
  }
  lines.forEach((line, number) => {
    const drawn = shape("path", { class: "line", d: path(line.values, x, y), "data-points": line.values.filter((value) => value !== null).length });
    drawn.style.stroke = COLOURS[number];
    svg.append(drawn);
    line.values.forEach((value, place) => {
      if (value === null || (line.values[place - 1] ?? null) !== null || (line.values[place + 1] ?? null) !== null) return;
      const dot = shape("circle", { cx: x(place), cy: y(value), r: 3 }); // a value between two gaps has no line
      dot.style.fill = COLOURS[number];
      svg.append(dot);
    });
  });
  if (!values.length) svg.append(shape("text", { class: "empty", x: (x(0) + x(times.length - 1)) / 2, y: y(most / 2) }, empty));
  box.replaceChildren(svg);
  legend(box.previousElementSibling, lines);
}

function legend(list, lines) {
  list.replaceChildren(...lines.map((line, number) => {
    const [row, mark] = [document.createElement("li"), document.createElement("i")];
    mark.style.background = COLOURS[number];
    row.append(mark, line.name);
    return row;
  }));
}

const shown = (value) => String(Number(value.toPrecision(3)));

function path(values, x, y) {
  const parts = [];
  let pen = "M";
  values.forEach((value, place) => {
    if (value !== null) parts.push(`${pen}${x(place).toFixed(1)} ${y(value).toFixed(1)}`);
    pen = value === null ? "M" : "L";
  });
  return parts.join("");
}
