// The endpoint's requests and responses.

const KEY = "raycl.key";
const BASE = new URL("..", import.meta.url);
const UNREACHABLE = "The endpoint cannot be reached: is it still running?";

/** What the server would not do, in its own sentence; status 0 if it did not answer at all. */
export class Refused extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

let key = "";
try {
  key = sessionStorage.getItem(KEY) ?? "";
} catch {
  // a browser that keeps nothing: the key lasts until the page is left
}

export const hasKey = () => Boolean(key);

/** The absolute address of a path of the endpoint, whichever page asks. */
export const address = (path) => new URL(path, BASE).href;

export function setKey(given) {
  key = given;
  try {
    sessionStorage.setItem(KEY, key);
  } catch {
    // as above
  }
}

/** GET without a body, POST with one; a key, once given, goes along. */
export async function ask(path, body, signal) {
  const headers = {};
  // headers hold bytes: a key of other letters travels as the UTF-8 that the server compares with
  if (key) headers.Authorization = `Bearer ${String.fromCharCode(...new TextEncoder().encode(key))}`;
  if (body) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(address(path), { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal });
  } catch (error) {
    throw error.name === "AbortError" ? error : new Refused(UNREACHABLE, 0);
  }
  if (!response.ok) throw new Refused(await sentence(response), response.status);
  return response;
}

async function sentence(response) {
  const plain = `The server answered ${response.status} ${response.statusText}`.trim();
  try {
    return (await response.json()).error.message || plain;
  } catch {
    return plain;
  }
}

export async function json(path, body, signal) {
  const found = await (await ask(path, body, signal)).json();
  signal?.throwIfAborted();
  return found;
}

/** The server-sent events of an answer as they come, parsed; an error among them is thrown. */
export async function* events(path, body, signal) {
  const reader = (await ask(path, body, signal)).body.pipeThrough(new TextDecoderStream()).getReader();
  let left = "";
  for (;;) {
    let piece;
    try {
      piece = await reader.read();
    } catch (error) {
      throw error.name === "AbortError" ? error : new Refused("The connection broke in the middle of the answer.", 0);
    }
    if (piece.done) throw new Refused("The answer ended before it was finished.", 0);
    const parts = (left + piece.value).split(/\r?\n\r?\n/);
    left = parts.pop();
    for (const part of parts) {
      const data = part.split(/\r?\n/).filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim());
      if (!data.length) continue;
      if (data.join("") === "[DONE]") return;
      const event = JSON.parse(data.join("\n"));
      if (event.error) throw new Refused(event.error.message, 200);
      signal?.throwIfAborted();
      yield event;
    }
  }
}
