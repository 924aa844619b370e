// Answers of the active snapshot beside the rows that its tasks were learned from, and texts far from all of them.
// Tasks, labels and texts are untrusted: they become text nodes, never markup.

import { show } from "./key.js";
import { keepFresh } from "./poll.js";
import { Refused, json } from "./wire.js";

const POLL_MS = 5000;
const LOST_MS = 60_000;
const SHOWN = 20;
const FEWEST = 20;
const LIMIT = 1.96; // standard errors of a difference of two shares: 95 %

const $ = (id) => document.getElementById(id);
const replicas = new Map();

/** As on the rest of the page, what each replica said last is kept, and summed. */
async function refresh() {
  let found;
  try {
    found = await json("v1/drift");
  } catch (error) {
    if (!(error instanceof Refused) || error.status === 401) throw error;
    show($("drift-note"), error.message); // at the top of the page, the next reading of the metrics would remove it
    return;
  }
  replicas.set(found.replica, { ...found, seen: Date.now() });
  for (const [name, one] of replicas) {
    if (Date.now() - one.seen > LOST_MS || one.snapshot !== found.snapshot) replicas.delete(name);
  }
  draw(found);
  await drawUnsure(found.keeps_unsure);
}

function draw({ snapshot, training }) {
  const served = {};
  for (const one of replicas.values()) {
    for (const [task, counts] of Object.entries(one.served)) served[task] = sum(served[task], counts);
  }
  const notes = {
    ready: `Snapshot ${snapshot} since it began to answer. Held-out rows of each task are read by the same router; labels are those of training rows. A difference in bold is larger than chance, at 95 %.`,
    counting: "Held-out rows of the tasks are being read.",
    missing: `The rows of training cannot be read here: ${training.reason}`,
  };
  show($("drift-note"), notes[training.state]);
  const tasks = [...new Set([...Object.keys(training.data), ...Object.keys(served)])];
  const total = tasks.reduce((count, task) => count + (served[task]?.texts ?? 0), 0);
  const lines = tasks.map((task) => line(task, served[task], training.data[task], total));
  const text = JSON.stringify(lines);
  if (text === $("drift").dataset.drawn) return;
  $("drift").dataset.drawn = text;
  const heads = ["task", "answers", "of no task, served", "of no task, held-out rows", "label that changed most"];
  $("drift").replaceChildren(row("th", heads.map((words) => [words])), ...lines.map((cells) => row("td", cells)));
}

function sum(before, counts) {
  const labels = { ...before?.labels };
  for (const [label, count] of Object.entries(counts.labels)) labels[label] = (labels[label] ?? 0) + count;
  const unknown = counts.unknown === null ? (before?.unknown ?? null) : (before?.unknown ?? 0) + counts.unknown;
  return { texts: (before?.texts ?? 0) + counts.texts, unknown, labels };
}

const percent = (share) => `${Math.round(100 * share)} %`;

/** The cells of a task, each as its words and whether they stand out. */
function line(task, served, training, total) {
  const answers = served ? `${served.texts} (${percent(served.texts / total)})` : "0";
  const known = (counts) => Boolean(counts?.texts) && counts.unknown !== null;
  const share = (counts) => (known(counts) ? percent(counts.unknown / counts.texts) : "–");
  const strange = known(served) && known(training) && differs(served.unknown, served.texts, training.unknown, training.texts);
  return [[task || "none"], [answers], [share(served), strange], [share(training)], label(served, training)];
}

/** Whether two shares differ by more than chance; few texts say nothing. */
function differs(one, of, other, outOf) {
  if (of < FEWEST || outOf < FEWEST) return false;
  const both = (one + other) / (of + outOf);
  return Math.abs(one / of - other / outOf) > LIMIT * Math.sqrt(both * (1 - both) * (1 / of + 1 / outOf));
}

function label(served, training) {
  const count = (counts) => Object.values(counts?.labels ?? {}).reduce((all, some) => all + some, 0);
  const [of, outOf] = [count(served), count(training)];
  if (!of || !outOf) return ["–"];
  const shares = (name) => [(served.labels[name] ?? 0) / of, (training.labels[name] ?? 0) / outOf];
  const distance = (name) => Math.abs(shares(name)[0] - shares(name)[1]);
  const names = [...new Set([...Object.keys(served.labels), ...Object.keys(training.labels)])];
  const most = names.reduce((best, name) => (distance(name) > distance(best) ? name : best));
  const [now, then] = shares(most);
  const strange = differs(served.labels[most] ?? 0, of, training.labels[most] ?? 0, outOf);
  return [`${most}: ${percent(now)} served, ${percent(then)} in training`, strange];
}

function row(kind, cells) {
  const found = document.createElement("tr");
  found.append(...cells.map(([words, standsOut]) => {
    const cell = document.createElement(kind);
    cell.textContent = words;
    cell.classList.toggle("stands-out", Boolean(standsOut));
    return cell;
  }));
  return found;
}

async function drawUnsure(kept) {
  if (!kept) {
    show($("unsure-note"), "None is kept. raycl serve keep_unsure=100 keeps the farthest in memory, as candidates for the next task.");
    return;
  }
  let texts;
  try {
    texts = (await json("admin/unsure")).data;
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    show($("unsure-note"), error.message);
    return;
  }
  show($("unsure-note"), texts.length ? `The farthest ${Math.min(SHOWN, texts.length)} of ${texts.length} that a replica keeps.` : "No text yet.");
  $("unsure").replaceChildren(...texts.slice(0, SHOWN).map((one) => {
    const found = document.createElement("li");
    const [text, small] = ["span", "small"].map((tag) => document.createElement(tag));
    text.textContent = one.text;
    const score = one.ood_score === null ? "" : `, out-of-distribution score ${one.ood_score.toFixed(3)}`;
    small.textContent = ` ${one.task || "no task"} ${one.weight.toFixed(2)}${score}${one.unknown ? ", of no task" : ""}`;
    found.append(text, small);
    return found;
  }));
  const lines = texts.map(({ text }) => `${JSON.stringify({ text, label: "" })}\n`);
  URL.revokeObjectURL($("unsure-file").href);
  $("unsure-file").href = URL.createObjectURL(new Blob(lines, { type: "application/jsonl" }));
  $("unsure-file").hidden = !texts.length;
}

keepFresh(refresh, POLL_MS);
