// The page of metrics: intervals that replicas count, summed and drawn.

import { milliseconds } from "./card.js";
import { show } from "./key.js";
import { MOST_LINES, plot } from "./plot.js";
import { keepFresh } from "./poll.js";
import { json } from "./wire.js";

const POLL_MS = 5000;
const POINTS = 60;
const LOST_S = 60;

const $ = (id) => document.getElementById(id);
const replicas = new Map();

/** Behind a proxy each request may reach another replica: what each said last is kept, and summed. */
async function refresh() {
  const found = await json("v1/metrics");
  replicas.set(found.replica, found);
  for (const [name, one] of replicas) if (found.now - one.now > LOST_S) replicas.delete(name);
  show($("problem"), "");
  draw(found);
}

const nothing = (classes) => ({ statuses: {}, answers: 0, tokens: 0, total_ms: Array(classes).fill(0), weights: {}, ood: Array(10).fill(0), ood_sum: 0 });

function add(sum, one) {
  sum.answers += one.answers;
  sum.tokens += one.tokens;
  sum.ood_sum += one.ood_sum;
  for (const key of ["total_ms", "ood"]) one[key].forEach((count, place) => (sum[key][place] += count));
  for (const key of ["statuses", "weights"]) {
    for (const [name, value] of Object.entries(one[key])) sum[key][name] = (sum[key][name] ?? 0) + value;
  }
  return sum;
}

const total = (counts) => counts.reduce((sum, count) => sum + count, 0);

/** A quantile of counted times in ms: the upper bound of its class, at most the largest bound; null: no answer. */
function quantile(counts, bounds, share) {
  const all = total(counts);
  if (!all) return null;
  let seen = 0;
  const place = counts.findIndex((count) => (seen += count) >= share * all);
  return bounds[Math.min(place, bounds.length - 1)];
}

const kinds = { answered: ["2"], refused: ["4"], failed: ["3", "5"] };
const counted = (sum, codes) => total(codes.map((code) => sum.statuses[code] ?? 0));

function draw({ now, interval_s, bounds_ms }) {
  const span = Number($("span").value);
  const width = Math.max(interval_s, span / POINTS);
  const end = Math.floor(now / width) * width;
  const times = Array.from({ length: POINTS }, (_, place) => end - (POINTS - 1 - place) * width);
  const points = times.map(() => nothing(bounds_ms.length + 1));
  for (const { data } of replicas.values()) {
    for (const one of data) {
      const place = Math.floor((one.start - times[0]) / width);
      if (place >= 0 && place < POINTS) add(points[place], one);
    }
  }
  const all = points.reduce(add, nothing(bounds_ms.length + 1));
  const scored = (sum) => total(sum.ood);
  const mean = (sum) => (scored(sum) ? sum.ood_sum / scored(sum) : null);
  const time = (share) => (sum) => quantile(sum.total_ms, bounds_ms, share);
  const [half, most] = [time(0.5)(all), time(0.95)(all)];
  show($("state"), `${replicas.size} ${replicas.size === 1 ? "replica" : "replicas"}`);
  drawTotals({
    Answers: String(all.answers),
    "Generated tokens": String(all.tokens),
    Refused: String(counted(all, kinds.refused)),
    Failed: String(counted(all, kinds.failed)),
    "Half within": half === null ? "–" : milliseconds(half),
    "95 % within": most === null ? "–" : milliseconds(most),
    "Mean out-of-distribution": mean(all) === null ? "–" : mean(all).toFixed(2),
  });
  const line = (name, value) => ({ name, values: points.map(value) });
  const rates = Object.entries(kinds).map(([name, codes]) => line(name, (sum) => counted(sum, codes) / width));
  plot($("requests"), rates, times, { empty: "no request yet" });
  plot($("times"), [line("half within", time(0.5)), line("95 % within", time(0.95))], times, { unit: " ms", empty: "no answer yet" });
  plot($("weights"), weights(points, all), times, { empty: "no answer yet" });
  const strange = (sum) => (scored(sum) ? sum.ood[9] / scored(sum) : null);
  plot($("ood"), [line("mean", mean), line("share of 0.9 and above", strange)], times, { top: 1, empty: "no score yet" });
}

/** A line for each task; of many, those with the largest weights, and one for the rest. */
function weights(points, all) {
  const names = Object.keys(all.weights).sort((one, other) => Math.abs(all.weights[other]) - Math.abs(all.weights[one]));
  const own = names.length > MOST_LINES ? names.slice(0, MOST_LINES - 1) : names;
  const value = (sum, some) => (sum.answers ? total(some.map((name) => sum.weights[name] ?? 0)) / sum.answers : null);
  const lines = own.map((name) => ({ name, values: points.map((sum) => value(sum, [name])) }));
  const rest = names.slice(own.length);
  if (rest.length) lines.push({ name: `${rest.length} other tasks`, values: points.map((sum) => value(sum, rest)) });
  return lines;
}

function drawTotals(totals) {
  $("totals").replaceChildren(...Object.entries(totals).map(([name, words]) => {
    const [row, term, value] = ["div", "dt", "dd"].map((tag) => document.createElement(tag));
    [term.textContent, value.textContent] = [name, words];
    row.append(term, value);
    return row;
  }));
}

const redraw = () => replicas.size && draw([...replicas.values()].at(-1));
$("span").addEventListener("change", redraw);
new ResizeObserver(redraw).observe($("charts"));
keepFresh(refresh, POLL_MS);
