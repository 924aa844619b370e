// The page: what is typed goes to the endpoint, what comes back goes into the cards.

import { Card, milliseconds } from "./card.js";
import { drawExamples } from "./examples.js";
import { attempt, show, wantKey } from "./key.js";
import { keepFresh } from "./poll.js";
import { Switch } from "./switch.js";
import { Refused, address, events, hasKey, json } from "./wire.js";

const POLL_MS = 3000;
const TYPING_MS = 120;
const RECENT = "raycl.recent";
const REMEMBERED = 5;

const $ = (id) => document.getElementById(id);
const known = { active: 0, kind: "", tasks: [], adapters: [], snapshots: [] };
const ANSWERS = { encoder: "v1/classify" };
const answersPath = () => ANSWERS[known.kind] ?? "v1/chat/completions";

// ---- cards -------------------------------------------------------------------------------------------------------

const pinned = document.createElement("select");
pinned.id = "pinned-choice";
pinned.setAttribute("aria-label", "Task or adapter to use alone");

const cards = {
  auto: new Card("auto", "raycl", document.createTextNode("adapters chosen by the text")),
  base: new Card("base", "Bare backbone", document.createTextNode("as it was before any task")),
  pinned: new Card("pinned", "Pinned", pinned),
};
$("cards").append(...Object.values(cards).map((card) => card.root));
cards.base.noMixture("No adapter is active.");

// ---- what the endpoint serves ------------------------------------------------------------------------------------

const switching = new Switch(() => attempt(refresh));

async function refresh() {
  const served = await json("v1/snapshots");
  const problem = served.problem ? `Snapshot ${served.active} still answers: ${served.problem}` : "";
  show($("problem"), problem);
  switching.update(served);
  $("chat").hidden = !served.chat;
  if (served.active === known.active && served.data.length === known.snapshots.length) return;
  const adapters = (await json("v1/adapters")).data;
  const moved = known.active && served.active !== known.active;
  Object.assign(known, { active: served.active, kind: served.kind, tasks: served.tasks, adapters, snapshots: served.data });
  describe(moved);
  route.now();
  await drawExamples((await json("v1/tasks")).data, write);
  showEmpty();
}

function describe(moved) {
  const count = known.tasks.length;
  $("snapshot").textContent = `snapshot ${known.active}`;
  $("summary").textContent = `· ${count} ${count === 1 ? "task" : "tasks"} · ${known.kind}`;
  $("state").classList.toggle("moved", Boolean(moved));
  document.body.dataset.kind = known.kind;
  const numbers = [...known.snapshots].reverse().map((number) => [String(number), String(number)]);
  fill($("pin"), [["", `active (${known.active})`], ...numbers]);
  fill($("task"), [["", "not given"], ...known.tasks.map((task) => [task, task])]);
  const alone = known.tasks.filter((task) => known.adapters.some((one) => one.tasks.join() === task));
  const names = known.adapters.filter((one) => !alone.includes(one.name)).map((one) => `${one.name}@${one.version}`);
  fill(pinned, alone.map((task) => [task, task]), names.map((name) => [name, name]));
  $("answers-path").textContent = `POST /${answersPath()}`;
  announcePinned();
  showCards();
}

function announcePinned() {
  cards.pinned.noMixture(`Only ${pinned.value} is active.`);
}

/** Only cards that can answer are there: an encoder's bare backbone has no label head, and there may be no adapter. */
function showCards() {
  cards.base.root.hidden = known.kind === "encoder";
  cards.pinned.root.hidden = !pinned.value;
  $("cards").dataset.count = shownCards().length;
}

const shownCards = () => Object.keys(cards).filter((name) => !cards[name].root.hidden);

/** Examples stand in the place of answers until there is a text. */
function showEmpty() {
  const empty = !$("text").value && !sent;
  $("empty").hidden = !empty || !known.active;
  $("cards").hidden = empty;
}

/** Options of a select, in one group or two; what was chosen stays chosen if it is still there. */
function fill(select, first, second = []) {
  const before = select.value;
  const options = (pairs) => pairs.map(([value, words]) => new Option(words, value));
  select.replaceChildren(...options(first));
  if (second.length) {
    const group = document.createElement("optgroup");
    group.label = "adapters";
    group.append(...options(second));
    select.append(group);
  }
  if ([...select.options].some((option) => option.value === before)) select.value = before;
}

// ---- the mixture, requested while typing -------------------------------------------------------------------------

/** One question at a time, the latest text next, however slow the endpoint is. */
const route = {
  timer: 0,
  busy: false,
  again: false,
  soon() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.now(), TYPING_MS);
  },
  async now() {
    clearTimeout(this.timer);
    if (this.busy) {
      this.again = true;
      return;
    }
    this.busy = true;
    try {
      await this.once($("text").value);
    } finally {
      this.busy = false;
    }
    if (this.again) {
      this.again = false;
      await this.now();
    }
  },
  async once(text) {
    if (!known.active) return;
    if (!text.trim()) {
      cards.auto.mixture({ tasks: {}, adapters: {} }, known.tasks);
      return;
    }
    try {
      const found = await json("v1/route", { ...auto(), input: text });
      if ($("text").value === text) cards.auto.mixture(found.data[0].raycl, known.tasks);
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      if (error.status === 401) wantKey(error.message);
      else cards.auto.noMixture(error.message);
    }
  },
};

// ---- requests ----------------------------------------------------------------------------------------------------

const snapshot = () => ($("pin").value ? { snapshot: Number($("pin").value) } : {});
const auto = () => ({
  model: "auto",
  raycl: { ...snapshot(), mix: $("mix").checked, ...($("task").value ? { task: $("task").value } : {}) },
});
const selections = { auto, base: () => ({ model: "base", raycl: snapshot() }), pinned: () => ({ model: pinned.value, raycl: snapshot() }) };

function sampling() {
  const given = ["max_tokens", "temperature", "seed"].filter((name) => $(name).value !== "");
  return Object.fromEntries(given.map((name) => [name, Number($(name).value)]));
}

let current = null;
let sent = false;

async function send() {
  const text = $("text").value;
  if (!text.trim() || !known.active) return;
  stop();
  const mine = (current = new AbortController());
  $("stop").disabled = false;
  sent = true;
  showEmpty();
  remember(text);
  await Promise.all(shownCards().map((name) => answer(name, text, mine.signal)));
  if (current === mine) stop();
}

function stop() {
  current?.abort();
  current = null;
  $("stop").disabled = true;
}

async function answer(name, text, signal) {
  const card = cards[name];
  card.begin();
  card.showRequest(commandLine(answersPath(), requestBody(name, text)));
  try {
    await (known.kind === "encoder" ? classify : generate)(name, text, signal);
  } catch (error) {
    if (signal.aborted && current && current.signal !== signal) return; // a newer question has the card
    if (error.name === "AbortError") card.stopped();
    else if (!(error instanceof Refused)) throw error;
    else {
      if (error.status === 401) wantKey(error.message);
      card.failed(error.message);
    }
  }
}

/** A request's body; of a text answer, without what makes it a stream. */
function requestBody(name, text) {
  if (known.kind === "encoder") return { ...selections[name](), input: text };
  return { ...selections[name](), ...sampling(), messages: [{ role: "user", content: text }] };
}

/** The request for a POSIX shell; the key itself stays out of it. */
function commandLine(path, body) {
  const quoted = (words) => `'${words.replaceAll("'", "'\\''")}'`;
  const key = hasKey() ? ['-H "Authorization: Bearer $RAYCL_KEY"'] : [];
  const parts = [`curl ${quoted(address(path))}`, "-H 'Content-Type: application/json'", ...key, `-d ${quoted(JSON.stringify(body))}`];
  return parts.join(" \\\n  ");
}

async function classify(name, text, signal) {
  const found = (await json("v1/classify", requestBody(name, text), signal)).data[0];
  showMixture(name, text, found.raycl);
  cards[name].classified(found.label, found.scores);
  cards[name].end(remarks(name, found.raycl));
}

async function generate(name, text, signal) {
  const more = [];
  let how = null;
  const stream = { stream: true, stream_options: { include_usage: true } };
  for await (const event of events("v1/chat/completions", { ...requestBody(name, text), ...stream }, signal)) {
    if (event.raycl) showMixture(name, text, (how = event.raycl));
    const choice = event.choices[0];
    cards[name].add(choice?.delta.content);
    if (choice?.finish_reason === "length") more.push("cut at the limit of tokens");
    const tokens = event.usage?.completion_tokens;
    if (tokens !== undefined) more.unshift(`${tokens} ${tokens === 1 ? "token" : "tokens"}`);
  }
  cards[name].end([...more, ...remarks(name, how)]);
}

/** Bars of the answer itself, unless the text has changed since. */
function showMixture(name, text, how) {
  if (!how || name === "base") return;
  if (name === "pinned") cards.pinned.mixture(how, []);
  else if ($("text").value === text) cards.auto.mixture(how, known.tasks);
}

function remarks(name, how) {
  const found = [];
  if (how && name === "auto") found.push(`routed in ${milliseconds(how.retrieval_ms)}`);
  if (how?.template) found.push(`prompted as ${how.template}`);
  if (how?.cut_tokens) found.push(`${how.cut_tokens} tokens of the text cut off`);
  return found;
}

// ---- texts sent before, kept in this browser ---------------------------------------------------------------------

function recent() {
  try {
    const kept = JSON.parse(localStorage.getItem(RECENT));
    return Array.isArray(kept) ? kept.filter((text) => typeof text === "string") : [];
  } catch {
    return [];
  }
}

function remember(text) {
  keep([text, ...recent().filter((other) => other !== text)].slice(0, REMEMBERED));
}

function keep(texts) {
  try {
    if (texts.length) localStorage.setItem(RECENT, JSON.stringify(texts));
    else localStorage.removeItem(RECENT);
  } catch {
    // a browser that keeps nothing: they last until the page is left
  }
  drawRecent(texts);
}

function drawRecent(texts) {
  const chip = (words, title, act) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = words;
    button.title = title;
    button.addEventListener("click", act);
    return button;
  };
  const chips = texts.map((text) => chip(text, text, () => write(text)));
  const forget = () => {
    keep([]);
    $("text").focus();
  };
  if (chips.length) chips.push(chip("×", "Forget these texts", forget));
  chips.at(-1)?.setAttribute("aria-label", "Forget these texts");
  $("recent").replaceChildren(...chips);
}

function write(text) {
  $("text").value = text;
  typed();
  $("text").focus();
}

// ---- the page itself ---------------------------------------------------------------------------------------------

function typed() {
  showEmpty();
  for (const card of Object.values(cards)) card.stale(true);
  route.soon();
}

$("text").addEventListener("input", typed);
$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("stop").addEventListener("click", stop);
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && $("ask").contains(event.target)) {
    event.preventDefault();
    $("ask").requestSubmit();
  }
  if (event.key === "Escape") stop();
});
for (const id of ["mix", "pin", "task"]) $(id).addEventListener("change", () => route.now());
pinned.addEventListener("change", () => {
  cards.pinned.stale(true);
  announcePinned();
});
$("settings").addEventListener("invalid", () => ($("settings").open = true), true);

drawRecent(recent());
keepFresh(refresh, POLL_MS);
