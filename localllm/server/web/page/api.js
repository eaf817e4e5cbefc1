// Requests to this server's API. If the server requires a key, the user is asked for it and the request is repeated.

import { $ } from "./dom.js";
import { remember, remembered } from "./store.js";

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
    $("key-title").textContent = wrong ? "The server does not know this key" : "This server requires a key";
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

function problem({ message, n_prompt_tokens: prompt, n_ctx: context }) {
  return Object.assign(new Error(message), prompt > 0 && context > 0 ? { prompt, context } : {});
}

// Returns the names of the models that can generate text.
export async function models() {
  const listed = await (await request("/v1/models")).json();
  const embedding = new Set((listed.models ?? []).filter((one) => one.capabilities?.length && !one.capabilities.includes("completion")).map((one) => one.name));
  return listed.data.map((one) => one.id).filter((id) => !embedding.has(id));
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
  const response = await request("/v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true }, return_progress: true, timings_per_token: true }),
    signal,
  });
  let rest = "", ended = false;
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
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
  }
  if (!ended) throw new Error("The connection ended before the answer did.");
}
