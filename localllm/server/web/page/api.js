// Requests to this server's API. If the server requires a key, the user is asked for it and the request is repeated.

import { $ } from "./dom.js";
import { remember, remembered } from "./store.js";

const LONGEST_LINE = 1 << 22; // maximum characters of one line of a stream

let key = remembered("key", "");
let asking = null;

export const currentKey = () => key;

export function setKey(value) {
  key = value;
  remember("key", value);
}

function askForKey(wrong) {
  asking ??= new Promise((resolve) => {
    const dialog = $("key");
    $("key-title").textContent = wrong ? "The server rejected this key" : "This server requires a key";
    $("key-value").value = "";
    dialog.returnValue = "";
    dialog.showModal();
    dialog.addEventListener("close", () => {
      asking = null;
      if (dialog.returnValue === "save") setKey($("key-value").value.trim());
      resolve(dialog.returnValue === "save");
    }, { once: true });
  });
  return asking;
}

async function request(path, options = {}) {
  for (;;) {
    const used = key;
    const headers = { ...options.headers, ...(used ? { Authorization: `Bearer ${used}` } : {}) };
    let response;
    try {
      response = await fetch(path, { ...options, headers, credentials: "omit", cache: "no-store" });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Error("The server cannot be reached. Is it still running?");
    }
    if (response.status === 401 && (used !== key || (await askForKey(used !== "")))) continue;
    if (!response.ok) throw await problemOf(response);
    return response;
  }
}

// Returns an Error. If the prompt was too long, it has {prompt, context}: the prompt's length and the maximum, in tokens.
async function problemOf(response) {
  const text = await response.text();
  try {
    return problem(JSON.parse(text).error);
  } catch {
    return new Error(`The server answered ${response.status}.`);
  }
}

function problem(error) {
  if (typeof error === "string") return new Error(error); // Ollama's format
  const { message, n_prompt_tokens: prompt, n_ctx: context } = error;
  return Object.assign(new Error(message), prompt > 0 && context > 0 ? { prompt, context } : {});
}

// Returns the server's models: {id, state, bytes, quantization, parameters, chats, base}, where `chats` is false for a model
// that cannot write text, and `base` names the model whose files a derived model uses. Missing fields are "" or 0.
export async function models() {
  const listed = await (await request("/v1/models")).json();
  const tags = new Map((listed.models ?? []).map((one) => [one.name, one]));
  return listed.data.map(({ id, status, meta }) => ({
    id,
    state: status?.value ?? "",
    bytes: meta?.size ?? 0,
    quantization: meta?.ftype ?? "",
    parameters: meta?.n_params ?? 0,
    chats: !tags.get(id)?.capabilities?.length || tags.get(id).capabilities.includes("completion"), // a damaged file has none
    base: tags.get(id)?.details?.parent_model ?? "",
  }));
}

// Returns the state of one model: unloaded, loading, loaded or failed.
export async function stateOf(model) {
  return (await (await request(`/v1/models/${encodeURIComponent(model)}`)).json()).status?.value ?? "";
}

// Returns what this server lets its clients do with models: {models, load, download, reason}. `models` are those that have
// short names, and `reason` says why models cannot be downloaded.
export const management = async () => (await request("/api/known")).json();

export const load = (model) => send("POST", "/models/load", { model });
export const unload = (model) => send("POST", "/models/unload", { model });
export const remove = (model) => send("DELETE", "/api/delete", { model });

const send = (method, path, body, signal) =>
  request(path, { method, headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal });

// Downloads a model, and calls `take` with every line of the stream until it returns true.
export async function pull(model, signal, take) {
  const response = await send("POST", "/api/pull", { model, stream: true }, signal);
  for await (const line of lines(response)) if (line.trim() && take(parsed(line))) return;
}

function parsed(line) {
  try {
    return JSON.parse(line);
  } catch {
    throw new Error("The server's answer could not be read.");
  }
}

// Yields the lines of a streamed response. The rest of the response is cancelled when the caller stops reading.
async function* lines(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      const found = (rest + value).split("\n");
      rest = found.pop();
      if (rest.length > LONGEST_LINE) throw new Error("The server's answer could not be read: a line of it never ends.");
      yield* found;
    }
    if (rest) yield rest;
  } catch (error) {
    throw error instanceof TypeError ? new Error("The connection to the server was lost.") : error;
  } finally {
    reader.cancel().catch(() => {}); // fails if the request was aborted
  }
}

// Returns {params, n_ctx}: the server's defaults for missing request fields, and the length of the context in tokens. It
// is an empty object if the server does not report them.
export async function properties(model) {
  try {
    const found = await (await request(`/props?model=${encodeURIComponent(model)}`)).json();
    return found.default_generation_settings ?? {};
  } catch {
    return {};
  }
}

// Requests a chat completion, and calls `take` with every chunk of the stream.
export async function stream(body, signal, take) {
  const extra = { stream: true, stream_options: { include_usage: true }, return_progress: true, timings_per_token: true };
  const response = await send("POST", "/v1/chat/completions", { ...body, ...extra }, signal);
  let ended = false;
  for await (const line of lines(response)) {
    if (!line.startsWith("data:")) continue; // skip keep-alive comments
    const data = line.slice(5).trim();
    if (data === "[DONE]") {
      ended = true;
      continue;
    }
    const chunk = JSON.parse(data);
    if (chunk.error) throw problem(chunk.error);
    take(chunk);
  }
  if (!ended) throw new Error("The connection ended before the answer did.");
}
