// The form for an API key, and what the whole page reports.

import { Refused, ask, setKey } from "./wire.js";

const $ = (id) => document.getElementById(id);
let again = async () => {};

/** Only what is new is written, as what is written is read out. */
export function show(element, words) {
  if (element.textContent !== words) element.textContent = words;
  element.hidden = !words;
}

export const waitsForKey = () => !$("key-form").hidden;

export function wantKey(words) {
  show($("key-why"), words);
  if (waitsForKey()) return;
  $("key-form").hidden = false;
  $("key").focus();
}

/** Errors that concern the whole page are shown at its top; `next` is done once there is a key, where one is missing. */
export async function attempt(work, next = work) {
  try {
    await work();
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    if (error.status === 401) {
      again = next;
      wantKey(error.message);
    } else show($("problem"), error.message);
  }
}

$("key-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  setKey($("key").value.trim());
  await attempt(async () => {
    await ask("v1/snapshots");
    $("key-form").hidden = true;
    $("key").value = "";
    $("text")?.focus();
    await again();
  }, again); // a key that is refused changes nothing about what waits for one
});
