// A conversation with the endpoint: each turn is answered by raycl, and beside it by the bare model with its own history.

import { drawBars, milliseconds } from "./card.js";
import { show, wantKey } from "./key.js";
import { markdown } from "./markdown.js";
import { keepFresh } from "./poll.js";
import { Refused, events, json } from "./wire.js";

const POLL_MS = 3000;
const TITLES = { auto: "raycl", base: "Bare model" };

const $ = (id) => document.getElementById(id);

/** @type {{said: string, replies: Record<string, Reply>, root: HTMLElement}[]} */
let turns = [];
let current = null;

async function refresh() {
  const served = await json("v1/snapshots");
  show($("problem"), served.chat ? "" : "This model has no chat template: what it says to a conversation is of little use.");
  $("snapshot").textContent = `snapshot ${served.active}`;
  const count = served.tasks.length;
  $("summary").textContent = `· ${count} ${count === 1 ? "task" : "tasks"}`;
}

// ---- one answer --------------------------------------------------------------------------------------------------

class Reply {
  constructor(model) {
    this.root = $("reply").content.cloneNode(true).firstElementChild;
    const part = (query) => this.root.querySelector(query);
    this.root.dataset.model = model;
    part("h2").textContent = TITLES[model];
    [this.written, this.note, this.bars, this.figures] = [".written", ".note", ".bars", ".figures"].map(part);
    this.text = "";
    this.set("waiting");
  }

  set(state) {
    this.root.dataset.state = state;
    this.written.setAttribute("aria-busy", String(state === "waiting"));
  }

  add(piece) {
    this.text += piece;
    this.written.replaceChildren(...markdown(this.text));
  }

  remark(words) {
    show(this.note, words);
  }
}

/** The messages of a conversation with a model up to a turn, with the system text. */
function messages(model, number) {
  const system = $("system").value.trim();
  const opening = system ? [{ role: "system", content: system }] : [];
  const earlier = turns.slice(0, number).filter((turn) => turn.replies[model]?.text);
  const before = earlier.flatMap(({ said, replies }) => [
    { role: "user", content: said },
    { role: "assistant", content: replies[model].text },
  ]);
  return [...opening, ...before, { role: "user", content: turns[number].said }];
}

function body(model, number) {
  const given = ["max_tokens", "temperature"].filter((name) => $(name).value !== "");
  const settings = Object.fromEntries(given.map((name) => [name, Number($(name).value)]));
  const stream = { stream: true, stream_options: { include_usage: true } };
  return { model, messages: messages(model, number), ...settings, ...stream };
}

async function answer(model, number, signal) {
  const reply = new Reply(model);
  const turn = turns[number];
  turn.replies[model]?.root.remove();
  turn.replies[model] = reply;
  turn.root.querySelector(".answers").append(reply.root);
  const began = performance.now();
  const figures = [];
  try {
    for await (const event of events("v1/chat/completions", body(model, number), signal)) {
      if (event.raycl) describe(reply, event.raycl, figures);
      const choice = event.choices[0];
      if (choice?.delta.content) reply.add(choice.delta.content);
      if (choice?.finish_reason === "length") figures.push("cut at the limit of tokens");
      if (event.usage) figures.push(`${event.usage.completion_tokens} ${event.usage.completion_tokens === 1 ? "token" : "tokens"}`);
    }
    reply.set("done");
    if (!reply.text) reply.remark("It answered with nothing.");
  } catch (error) {
    if (error.name === "AbortError") figures.push("stopped");
    else if (!(error instanceof Refused)) throw error;
    else {
      if (error.status === 401) wantKey(error.message);
      reply.remark(error.message);
    }
    reply.set("ended");
  }
  reply.figures.textContent = [milliseconds(performance.now() - began), ...figures].join(" · ");
}

/** The mixture of a turn. */
function describe(reply, how, figures) {
  if (reply.root.dataset.model === "auto") drawBars(reply.bars, Object.entries(how.tasks).slice(0, 4));
  if (how.template) figures.push(`prompted as ${how.template}`);
  if (how.unknown) figures.push(`of no learned task${Object.keys(how.adapters).length ? "" : ", so the bare model answers"}`);
  if (how.ood_score != null) figures.push(`out-of-distribution score ${how.ood_score.toFixed(2)}`);
  if (how.cut_tokens) figures.push(`${how.cut_tokens} tokens cut off`);
}

// ---- the conversation --------------------------------------------------------------------------------------------

async function answerTurn(number) {
  stop();
  const mine = (current = new AbortController());
  buttons();
  const models = $("beside").checked ? ["auto", "base"] : ["auto"];
  turns[number].replies.base?.root.remove();
  delete turns[number].replies.base;
  await Promise.all(models.map((model) => answer(model, number, mine.signal)));
  if (current === mine) current = null;
  buttons();
}

async function send() {
  const said = $("text").value.trim();
  if (!said) return;
  const root = $("turn").content.cloneNode(true).firstElementChild;
  root.querySelector(".said").textContent = said;
  turns.push({ said, replies: {}, root });
  $("turns").append(root);
  $("text").value = "";
  const answered = answerTurn(turns.length - 1);
  root.scrollIntoView({ block: "nearest" });
  await answered;
}

function stop() {
  current?.abort();
  current = null;
  buttons();
}

function buttons() {
  $("stop").disabled = !current;
  $("retry").disabled = $("clear").disabled = !turns.length;
}

function clear() {
  stop();
  turns = [];
  $("turns").replaceChildren();
  buttons();
  $("text").focus();
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("stop").addEventListener("click", stop);
$("retry").addEventListener("click", () => answerTurn(turns.length - 1));
$("clear").addEventListener("click", clear);
$("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    $("ask").requestSubmit();
  }
});
keepFresh(refresh, POLL_MS);
