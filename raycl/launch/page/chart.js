// The loss curve as SVG.

import { shape, ticks } from "./svg.js";

const MARGIN = { top: 8, right: 12, bottom: 32, left: 38 };
const NAME_PX = 6.8;

/** Draw `[step, loss]` points (loss null: not finite) into a box, with a line where each task begins. */
export function draw(box, loss, names) {
  const [width, height] = [box.clientWidth, box.clientHeight];
  const known = loss.points.filter(([, value]) => value !== null);
  const top = Math.max(1e-6, ...known.map(([, value]) => value)) * 1.05;
  const x = (step) => MARGIN.left + (step / Math.max(1, loss.steps)) * (width - MARGIN.left - MARGIN.right);
  const y = (value) => height - MARGIN.bottom - (value / top) * (height - MARGIN.top - MARGIN.bottom);
  const last = known.at(-1);
  const label = last ? `Training loss over ${last[0]} of ${loss.steps} steps, now ${last[1].toFixed(4)}` : "No step yet";
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  for (const value of ticks(top)) {
    svg.append(shape("line", { class: "grid", x1: x(0), x2: x(loss.steps), y1: y(value), y2: y(value) }));
    svg.append(shape("text", { x: x(0) - 6, y: y(value) + 4, "text-anchor": "end" }, String(Number(value.toPrecision(3)))));
  }
  loss.starts.forEach((start, number) => {
    const room = x(loss.starts[number + 1] ?? loss.steps) - x(start);
    if (number) svg.append(shape("line", { class: "start", x1: x(start), x2: x(start), y1: y(top), y2: y(0) }));
    const fitting = Math.floor((room - 4) / NAME_PX);
    const name = names[number].length <= fitting ? names[number] : fitting >= 4 ? `${names[number].slice(0, fitting - 1)}…` : "";
    if (room > 0) svg.append(shape("text", { x: x(start) + room / 2, y: height - 16, "text-anchor": "middle" }, name));
  });
  svg.append(shape("text", { x: x(loss.steps), y: height - 2, "text-anchor": "end" }, `${loss.steps} steps`));
  svg.append(shape("path", { class: "curve", d: path(loss, x, y), "data-points": loss.points.length }));
  if (last) svg.append(shape("circle", { cx: x(last[0]), cy: y(last[1]), r: 3 }));
  box.replaceChildren(svg);
}

/** A line for each task, broken where a loss is not finite. */
function path({ points, starts }, x, y) {
  let [pen, task] = ["M", 0];
  const parts = [];
  for (const [step, value] of points) {
    if (step > (starts[task + 1] ?? Infinity)) pen = "M";
    while (step > (starts[task + 1] ?? Infinity)) task += 1;
    if (value !== null) parts.push(`${pen}${x(step).toFixed(1)} ${y(value).toFixed(1)}`);
    pen = value === null ? "M" : "L";
  }
  return parts.join("");
}
