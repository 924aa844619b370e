// What keeps a page up to date: a request every few seconds.

import { attempt, waitsForKey } from "./key.js";

/** Calls `refresh` at once and then every `ms` milliseconds, but not while the page is hidden or waits for a key. */
export function keepFresh(refresh, ms) {
  let polling = 0;
  async function poll() {
    try {
      if (!document.hidden && !waitsForKey()) await attempt(refresh);
    } finally {
      clearTimeout(polling);
      polling = setTimeout(poll, ms);
    }
  }
  document.addEventListener("visibilitychange", poll);
  poll();
}
