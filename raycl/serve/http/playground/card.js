// One card: the mixture, the answer and the time it took.
// Names, labels and answers are untrusted text: they become text nodes, never markup.

const SHOWN = 6;
const STRANGE = 0.95;
const LIKELY = 4;

export const milliseconds = (ms) => (ms < 999.5 ? `${ms < 9.95 ? ms.toFixed(1) : Math.round(ms)} ms` : `${(ms / 1000).toFixed(2)} s`);

function weight(value) {
  if (value !== 0 && Math.abs(value) < 0.005) return value < 0 ? "> −0.01" : "< 0.01";
  return value.toFixed(2).replace("-", "−");
}

/** Bars by name; those of a name that stays are moved, not created again, so that the move is visible. */
export function drawBars(list, pairs) {
  const most = Math.max(1, ...pairs.map(([, value]) => Math.abs(value)));
  const rows = new Map([...list.children].map((row) => [row.firstChild.textContent, row]));
  const kept = pairs.map(([name, value]) => {
    const row = rows.get(name) || newBar(name);
    row.children[1].firstChild.style.width = `${(100 * Math.abs(value)) / most}%`;
    row.classList.toggle("negative", value < 0);
    row.classList.toggle("inactive", Math.abs(value) < 0.005);
    row.lastChild.textContent = weight(value);
    return row;
  });
  if (kept.length !== list.children.length || kept.some((row, place) => row !== list.children[place])) {
    list.replaceChildren(...kept);
  }
}

function newBar(name) {
  const row = document.createElement("li");
  const [label, track, value] = ["span", "span", "span"].map((tag) => document.createElement(tag));
  label.append(document.createElement("bdi"));
  label.firstChild.textContent = name;
  label.className = "name";
  label.title = name;
  track.className = "track";
  value.className = "value";
  track.append(document.createElement("i"));
  row.append(label, track, value);
  return row;
}

function drawMore(details, pairs, summary) {
  details.hidden = !pairs.length;
  details.firstElementChild.textContent = summary;
  drawBars(details.lastElementChild, pairs);
}

export class Card {
  /** @param {string} id @param {string} title @param {Node} subtitle */
  constructor(id, title, subtitle) {
    this.root = document.getElementById("card").content.cloneNode(true).firstElementChild;
    const part = (query) => this.root.querySelector(query);
    this.root.id = id;
    part("h2").textContent = title;
    part("h2").id = `${id}-title`;
    this.root.setAttribute("aria-labelledby", `${id}-title`);
    part(".subtitle").append(subtitle);
    this.bars = part(".mixture .bars");
    this.adapters = part(".mixture details");
    this.hint = part(".hint");
    this.ood = part(".ood");
    this.request = part(".request");
    this.request.querySelector("button").addEventListener("click", () => this.copy());
    this.output = part(".output");
    this.label = part(".label");
    this.note = part(".note");
    this.labels = part(".answer .bars");
    this.others = part(".answer details");
    this.state = part(".state");
    this.figures = part(".figures");
    this.text = document.createTextNode("");
    part(".text").append(this.text);
  }

  /** Bars for every task, inactive ones too; of many, those with the largest weights. */
  mixture(how, tasks) {
    const shares = new Map([...tasks.map((task) => [task, 0]), ...Object.entries(how.tasks)]);
    const largest = [...shares].sort((one, other) => Math.abs(other[1]) - Math.abs(one[1])).slice(0, SHOWN);
    const names = new Set(largest.map(([task]) => task));
    drawBars(this.bars, [...shares].filter(([task]) => names.has(task)));
    const rest = shares.size - largest.length;
    const adapters = Object.entries(how.adapters);
    drawMore(this.adapters, adapters, `${adapters.length} ${adapters.length === 1 ? "adapter" : "adapters"}`);
    const words = rest > 0 ? [`and ${rest} ${rest === 1 ? "task with a smaller weight" : "tasks with smaller weights"}`] : [];
    if (how.unknown) words.push(`of no learned task: distance ${how.ood_distance.toFixed(0)}, known texts lie below ${how.ood_threshold.toFixed(0)}${adapters.length ? "" : ", so the bare model answers"}`);
    else if (how.ood_score >= STRANGE) words.push(`unlike what was learned: ${Math.round(100 * how.ood_score)} % of known texts are nearer to a task`);
    this.setHint(words.join(" · "));
    this.score(how.ood_score, tasks.length > 0);
  }

  /**
   * The out-of-distribution score.
   * @param {number | null | undefined} value undefined: nothing is routed; null: there is no score
   * @param {boolean} routed where the router could have given one, it is said that there is none
   */
  score(value, routed) {
    this.ood.hidden = value === undefined || (value === null && !routed);
    this.ood.lastElementChild.textContent = value == null ? "none" : value.toFixed(2);
    this.ood.title = value === null ? "The router of this snapshot has no such score." : "Near 1 for a text unlike all learned tasks.";
    this.ood.classList.toggle("high", value >= STRANGE);
  }

  /** The request as a command line to copy. */
  showRequest(line) {
    this.request.hidden = false;
    this.request.querySelector("pre").textContent = line;
    this.request.querySelector("button").textContent = "Copy";
  }

  async copy() {
    const [line, button] = [this.request.querySelector("pre"), this.request.querySelector("button")];
    try {
      await navigator.clipboard.writeText(line.textContent);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(line); // no clipboard without https: the line is selected instead
      button.textContent = "Selected";
    }
  }

  /** Words instead of bars, or below them. */
  setHint(words) {
    this.hint.textContent = words;
  }

  noMixture(words) {
    drawBars(this.bars, []);
    drawMore(this.adapters, [], "");
    this.score(undefined);
    this.setHint(words);
  }

  begin() {
    this.began = performance.now();
    this.first = undefined;
    this.text.data = this.note.textContent = "";
    this.label.hidden = this.note.hidden = true;
    drawBars(this.labels, []);
    drawMore(this.others, [], "");
    this.figures.textContent = "";
    this.stale(false);
    this.set("waiting");
  }

  /** More of the answer. */
  add(piece) {
    if (!piece) return;
    this.first ??= performance.now() - this.began;
    this.text.appendData(piece);
    this.set("answering");
  }

  /** A label, and the probability of each that was in question, best first. */
  classified(label, scores) {
    this.label.textContent = label;
    this.label.hidden = false;
    const pairs = Object.entries(scores);
    drawBars(this.labels, pairs.slice(0, LIKELY));
    const rest = pairs.slice(LIKELY);
    drawMore(this.others, rest, `${rest.length} less likely ${rest.length === 1 ? "label" : "labels"}`);
  }

  /** @param {string[]} more what else is to be known */
  end(more = []) {
    const total = performance.now() - this.began;
    const first = this.first === undefined ? [] : [`first after ${milliseconds(this.first)}`];
    this.figures.textContent = [...first, `${milliseconds(total)} in all`, ...more].join(" · ");
    this.set("done");
    if (!this.text.data && this.label.hidden && this.note.hidden) this.remark("It answered with nothing.");
  }

  remark(words) {
    this.note.textContent = words;
    this.note.hidden = false;
  }

  stopped() {
    this.figures.textContent = `after ${milliseconds(performance.now() - this.began)}`;
    this.set("stopped");
  }

  failed(words) {
    this.remark(words);
    this.set("failed");
  }

  set(state) {
    const words = { waiting: "waiting", answering: "answering", done: "", stopped: "stopped", failed: "no answer" };
    this.root.dataset.state = state;
    this.state.textContent = words[state] || "";
    this.output.setAttribute("aria-busy", String(state === "waiting" || state === "answering"));
  }

  get busy() {
    return this.output.getAttribute("aria-busy") === "true";
  }

  /** The text above is another one by now. */
  stale(yes) {
    this.root.classList.toggle("stale", yes);
  }
}
