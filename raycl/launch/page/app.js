// The page of a run's status: what the server reads from the run's files is drawn again where it changed.

import { draw } from "./chart.js";

const POLL_MS = 2000;
const SILENT = "The server of this page does not answer: is 'raycl status --web' still running?";

const $ = (id) => document.getElementById(id);
const drawn = new Map();
let polling = 0;
let curve = null;

function element(name, words = "", attributes = {}) {
  const found = document.createElement(name);
  found.textContent = words;
  for (const [key, value] of Object.entries(attributes)) found.setAttribute(key, value);
  return found;
}

/** Draw a part if what it shows has changed: what is written anew loses its selection, and may be read out again. */
function refresh(part, shown, draws) {
  const text = JSON.stringify(shown);
  if (drawn.get(part) === text) return;
  drawn.set(part, text);
  draws(shown);
}

function show(id, words) {
  if ($(id).textContent !== words) $(id).textContent = words;
}

function problem(words) {
  show("problem", words);
  $("problem").hidden = !words;
}

/** Seconds as m:ss or h:mm:ss. */
function clock(seconds) {
  const whole = Math.round(seconds);
  const [hours, minutes, rest] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  const two = (number) => String(number).padStart(2, "0");
  return hours ? `${hours}:${two(minutes)}:${two(rest)}` : `${minutes}:${two(rest)}`;
}

const counted = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;

// ---- parts -------------------------------------------------------------------------------------------------------

function drawState(status) {
  document.body.dataset.state = status.state;
  show("title", status.title);
  show("state", status.state);
  show("message", status.message);
  const done = status.tasks.filter((task) => task.state === "done").length;
  document.title = `${status.state}, ${done} of ${status.tasks.length} tasks · ${status.title}`;
  const facts = {
    Run: status.run,
    "Time left": left(status.left),
    Step: status.details.step,
    Continues: status.details.from,
    Workers: workers(status),
    Attempts: status.details.attempts,
    Next: status.command,
  };
  const rows = Object.entries(facts).filter(([, words]) => words);
  refresh("facts", rows, () => {
    $("facts").replaceChildren(...rows.flatMap(([name, words]) => [element("dt", name), fact(name, words)]));
  });
}

function fact(name, words) {
  const found = element("dd", name === "Next" ? "" : words, { "data-fact": name });
  if (name === "Next") found.append(element("code", words));
  return found;
}

function workers({ nodes, workers }) {
  const listed = nodes.map((node) => `${node.host} (process ${node.processes.join(", ")})`).join("; ");
  return workers ? `${workers} on ${counted(nodes.length, "node")}: ${listed}` : "";
}

function left(seconds) {
  if (!seconds) return "";
  if (seconds.evaluation_s === null) return `about ${clock(seconds.training_s)} of training, and the evaluations`;
  const [training, evaluation] = [seconds.training_s, seconds.evaluation_s];
  return `about ${clock(training + evaluation)} (training ${clock(training)}, evaluation ${clock(evaluation)})`;
}

function drawTasks(tasks) {
  $("tasks").replaceChildren(...tasks.map(taskRow));
  if (!tasks.length) $("tasks").append(element("li", "No task has begun.", { class: "empty" }));
}

function taskRow(task) {
  const row = element("li", "", { class: task.state, ...(task.state === "current" ? { "aria-current": "step" } : {}) });
  const percent = task.steps ? Math.round((100 * task.step) / task.steps) : 0;
  const bar = element("span", "", {
    class: "track", role: "progressbar", "aria-label": task.name,
    "aria-valuemin": 0, "aria-valuemax": 100, "aria-valuenow": percent, "aria-valuetext": note(task),
  });
  const fill = element("i");
  fill.style.width = `${percent}%`;
  bar.append(fill);
  row.append(element("span", task.name, { class: "name", title: task.name }), bar, element("span", note(task), { class: "note" }));
  return row;
}

function note(task) {
  if (task.state === "waiting") return task.steps ? counted(task.steps, "step") : "waiting";
  if (task.state === "done") return `${counted(task.steps, "step")} · ${clock(task.train_s)} + ${clock(task.eval_s)}`;
  if (task.activity && task.activity !== "training") return task.activity;
  return task.steps ? `step ${task.step} of ${task.steps}` : `step ${task.step}`;
}

function drawLoss({ loss, names }) {
  curve = { loss, names };
  const last = loss.points.at(-1);
  const value = last && (last[1] === null ? "not finite" : last[1].toFixed(4));
  show("loss-now", last ? `${value} at step ${last[0]} of ${loss.steps}` : "no step is recorded yet");
  draw($("chart"), loss, names);
}

function drawMatrix({ matrix, current }) {
  show("metrics", Object.entries(matrix.metrics).map(([name, value]) => `${name} ${value.toFixed(1)}`).join("  "));
  if (!matrix.tasks.length) {
    $("matrix").replaceChildren(element("p", "No task is evaluated yet.", { class: "empty" }));
    return;
  }
  const head = element("tr");
  head.append(element("td"), ...matrix.tasks.map((task) => element("th", task, { scope: "col", title: task })));
  const rows = matrix.values.map((values, number) => {
    const row = element("tr", "", { class: number === current ? "evaluating" : "" });
    row.append(element("th", matrix.rows[number], { scope: "row", title: matrix.rows[number] }), ...values.map(cell));
    return row;
  });
  const table = element("table");
  table.style.setProperty("--tasks", matrix.tasks.length);
  const [thead, tbody] = [element("thead"), element("tbody")];
  thead.append(head);
  tbody.append(...rows);
  table.append(thead, tbody);
  $("matrix").replaceChildren(table);
}

function cell(value) {
  if (value === null) return element("td");
  const found = element("td", value.toFixed(1));
  found.style.backgroundColor = `color-mix(in srgb, var(--accent) ${Math.max(0, Math.min(100, value)) * 0.4}%, var(--track))`;
  return found;
}

function drawLog(log) {
  show("log-name", log.name);
  $("log").textContent = log.lines.join("\n");
}

// ---- the page itself ---------------------------------------------------------------------------------------------

function drawAll(status) {
  problem(status.problem ? `The run's files cannot be read now: ${status.problem}` : "");
  drawState(status);
  refresh("hangs", status.hangs, (hangs) => $("hangs").replaceChildren(...hangs.map((one) => element("p", one, { class: "notice" }))));
  refresh("tasks", status.tasks, drawTasks);
  refresh("loss", { loss: status.loss, names: status.tasks.map((task) => task.name) }, drawLoss);
  const current = status.tasks.findIndex((task) => task.activity === "evaluating");
  refresh("matrix", { matrix: status.matrix, current }, drawMatrix);
  refresh("log", status.log, drawLog);
  show("read", `Last read at ${new Date(status.time * 1000).toLocaleTimeString()}.`);
}

async function follow() {
  let status;
  try {
    const response = await fetch("status.json");
    status = response.ok ? await response.json() : null;
  } catch {
    status = null;
  }
  if (status) drawAll(status);
  else problem(SILENT);
}

/** Nothing is requested while the page is hidden. */
async function poll() {
  clearTimeout(polling);
  polling = 0;
  if (!document.hidden) await follow();
  if (!polling) polling = setTimeout(poll, POLL_MS);
}

document.addEventListener("visibilitychange", poll);
new ResizeObserver(() => curve && draw($("chart"), curve.loss, curve.names)).observe($("chart"));
poll();
