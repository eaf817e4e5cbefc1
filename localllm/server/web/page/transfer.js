// Exports conversations as JSON and imports them. An imported file is untrusted: every field is checked, ids are
// replaced, and unknown fields are dropped.

import { fileText, mediaKind } from "./answer.js";
import { newId } from "./store.js";
import { EFFORTS, FIELDS } from "./settings.js";

const FORMAT = "localllm-conversations";
const ROLES = ["user", "assistant", "tool"];
const STATES = ["done", "stopped", "interrupted", "failed", "length"];

export const exported = (conversations) => JSON.stringify({ format: FORMAT, version: 1, conversations }, null, 1);

const SPEAKERS = { user: "You", assistant: "Answer", tool: "Result of a call" };

// Returns the messages of one branch as a Markdown document.
export function asMarkdown(title, path) {
  const parts = [`# ${title}`];
  for (const one of path) {
    parts.push(`## ${SPEAKERS[one.role]}`);
    if (one.thought) parts.push(one.thought.replace(/^/gm, "> "));
    if (one.content) parts.push(one.content);
    parts.push(...(one.files ?? []).map((file) => fileText(file).trim()));
    parts.push(...(one.calls ?? []).filter(Boolean).map((call) => `Calls \`${call.name}\` with \`${call.arguments}\``));
  }
  return `${parts.join("\n\n")}\n`;
}

// Returns [{talk, messages}]. Throws an Error with the reason if the file is invalid.
export function imported(text) {
  let file;
  try {
    file = JSON.parse(text);
  } catch {
    throw new Error("it is not JSON.");
  }
  if (file?.format !== FORMAT || !Array.isArray(file.conversations)) throw new Error("it is not an export of this page.");
  if (file.version !== 1) throw new Error(`its version is ${file.version}, this page reads version 1.`);
  return file.conversations.map(conversation);
}

const string = (value) => (typeof value === "string" ? value : "");
const time = (value) => (Number.isFinite(value) && value > 0 ? value : Date.now());
const list = (value) => (Array.isArray(value) ? value : []);

function conversation(given) {
  const id = newId();
  const old = list(given?.messages).filter((one) => one && ROLES.includes(one.role) && typeof one.id === "string");
  const ids = new Map(old.map((one) => [one.id, newId()]));
  const messages = old.map((one) => message(one, id, ids));
  const leaf = ids.get(given.leaf) ?? messages.at(-1)?.id ?? null;
  const talk = {
    id, leaf, model: string(given.model).slice(0, 500), title: string(given.title).slice(0, 200) || "Imported", created: time(given.created), updated: time(given.updated),
    settings: {
      system: string(given.settings?.system),
      sampling: sampling(given.settings?.sampling),
      thinking: EFFORTS.includes(given.settings?.thinking) ? given.settings.thinking : "",
      tools: tools(given.settings?.tools),
    },
  };
  return { talk, messages };
}

function message(one, conversation, ids) {
  const made = {
    id: ids.get(one.id), conversation, parent: ids.get(one.parent) ?? null, role: one.role, created: time(one.created),
    content: string(one.content), status: STATES.includes(one.status) ? one.status : "interrupted",
  };
  if (one.deleted === true) return { ...made, content: "", deleted: true };
  if (one.dropped === true) made.dropped = true;
  if (one.role === "user") made.files = list(one.files).map((file) => ({
    name: string(file?.name), text: string(file?.text), ...(mediaKind(file?.media) ? { media: file.media } : {}),
  }));
  if (one.role === "tool") made.call = string(one.call);
  if (one.role !== "assistant") return made;
  made.calls = list(one.calls).filter(Boolean).map((call) => ({ id: string(call.id), name: string(call.name), arguments: string(call.arguments) }));
  made.thought = string(one.thought);
  made.model = string(one.model);
  if (Number.isFinite(one.thoughtSeconds)) made.thoughtSeconds = one.thoughtSeconds;
  if (made.status === "failed") made.error = string(one.error);
  const numbers = ["tokens", "prompt", "cached", "rate", "promptRate", "first"];
  if (one.stats && numbers.every((name) => Number.isFinite(one.stats[name]))) made.stats = Object.fromEntries(numbers.map((name) => [name, one.stats[name]]));
  return made;
}

function sampling(given) {
  return Object.fromEntries(FIELDS.filter(([name]) => Number.isFinite(given?.[name])).map(([name]) => [name, given[name]]));
}

function tools(given) {
  try {
    return Array.isArray(JSON.parse(given)) ? given : "";
  } catch {
    return "";
  }
}
