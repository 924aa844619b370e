// Which snapshot answers everyone: the last decisions, a switch, and the way back.
// Reasons are untrusted text: they become text nodes, never markup.

import { show, wantKey } from "./key.js";
import { Refused, json } from "./wire.js";

const JUDGED = "passed the gate: ";

const $ = (id) => document.getElementById(id);

export class Switch {
  /** @param {() => void} changed called after another snapshot was activated */
  constructor(changed) {
    this.changed = changed;
    this.before = 0;
    this.armed = false;
    $("activate").addEventListener("click", () => (this.armed ? this.activate(Number($("activate-number").value)) : this.arm(true)));
    $("activate-number").addEventListener("change", () => this.arm(false));
    $("back").addEventListener("click", () => this.activate(this.before));
  }

  update({ active, data, decisions }) {
    const text = JSON.stringify([active, data, decisions]);
    if (text === this.drawn) return;
    this.drawn = text;
    if (this.active && active !== this.active) this.before = this.active;
    this.before ||= decisions.find((one) => one.snapshot !== active && data.includes(one.snapshot))?.snapshot ?? 0;
    if (this.before === active) this.before = 0;
    this.active = active;
    const others = [...data].reverse().filter((number) => number !== active);
    const chosen = $("activate-number").value;
    $("activate-number").replaceChildren(...others.map((number) => new Option(String(number), String(number))));
    if (others.includes(Number(chosen))) $("activate-number").value = chosen;
    $("activate-number").disabled = $("activate").disabled = !others.length;
    $("back").hidden = !this.before;
    $("back").textContent = `Back to snapshot ${this.before}`;
    this.arm(false);
    const judged = decisions.find((one) => "rejected" in one || one.why.startsWith(JUDGED));
    $("gate").classList.toggle("rejected", Boolean(judged && "rejected" in judged));
    show($("gate"), judged ? `The gate's last judgement, ${when(judged)}: ${"rejected" in judged ? judged.why : `snapshot ${judged.snapshot} ${judged.why}`}` : "");
    $("decisions").replaceChildren(...decisions.map(row));
  }

  /** A first click says what the second one does, as it concerns everyone who asks. */
  arm(yes) {
    this.armed = yes;
    $("activate").textContent = yes ? `Activate snapshot ${$("activate-number").value} for everyone?` : "Activate";
  }

  async activate(number) {
    this.arm(false);
    try {
      const { active, before } = await json("admin/activate", { snapshot: number });
      show($("switch-note"), `Snapshot ${active} answers now, until a newer one is published or activated. Before: ${before}.`);
      this.changed();
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      if (error.status === 401) wantKey(error.message);
      else show($("switch-note"), error.message);
    }
  }
}

const when = (decision) => new Date(decision.time * 1000).toLocaleString();

function row(decision) {
  const found = document.createElement("li");
  found.textContent = `${when(decision)} · snapshot ${decision.snapshot} · ${decision.why}`;
  return found;
}
