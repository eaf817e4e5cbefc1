// Conversations stored in this browser. IndexedDB has one record per conversation and one per message, so that two tabs
// can write to one conversation without losing data. Changes are broadcast to other tabs. Settings are in localStorage.

const NAME = "localllm", VERSION = 1;
const channel = new BroadcastChannel("localllm");
let opened;

function database() {
  opened ??= new Promise((resolve, reject) => {
    const request = indexedDB.open(NAME, VERSION);
    request.onupgradeneeded = () => {
      request.result.createObjectStore("conversations", { keyPath: "id" });
      request.result.createObjectStore("messages", { keyPath: "id" }).createIndex("conversation", "conversation");
    };
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
  return opened;
}

async function transact(mode, work) {
  const base = await database();
  return new Promise((resolve, reject) => {
    const transaction = base.transaction(["conversations", "messages"], mode);
    const request = work(transaction.objectStore("conversations"), transaction.objectStore("messages"));
    transaction.oncomplete = () => resolve(request?.result);
    transaction.onabort = transaction.onerror = () => reject(transaction.error);
  });
}

export const newId = () => [...crypto.getRandomValues(new Uint8Array(12))].map((byte) => byte.toString(16).padStart(2, "0")).join("");

export const conversations = async () => (await transact("readonly", (talks) => talks.getAll())).sort((a, b) => b.updated - a.updated);

export const conversation = (id) => transact("readonly", (talks) => talks.get(id));

export async function messagesOf(id) {
  const found = await transact("readonly", (_, messages) => messages.index("conversation").getAll(id));
  return new Map(found.map((message) => [message.id, message]));
}

// Writes records in one transaction. With `quiet`, other tabs are not notified.
export async function save(talks, messages = [], quiet = false) {
  await transact("readwrite", (talkStore, messageStore) => {
    for (const talk of talks) talkStore.put(talk);
    for (const message of messages) messageStore.put(message);
  });
  if (!quiet) tell({ changed: talks[0]?.id ?? messages[0]?.conversation });
}

// Marks messages as interrupted, except messages that are no longer streaming.
export async function interrupt(ids) {
  await transact("readwrite", (_, messages) => {
    for (const id of ids) {
      const request = messages.get(id);
      request.onsuccess = () => {
        const { progress, timings, ...stored } = request.result ?? {};
        if (stored.status === "streaming") messages.put({ ...stored, status: "interrupted" });
      };
    }
  });
}

export async function remove(id) {
  await transact("readwrite", (talks, messages) => {
    talks.delete(id);
    const keys = messages.index("conversation").getAllKeys(id);
    keys.onsuccess = () => keys.result.forEach((key) => messages.delete(key));
  });
  tell({ changed: id });
}

// Returns the ids of the conversations whose title and messages together contain all words of `text`.
export async function search(text) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  const found = new Map();
  const add = (id, part) => found.set(id, `${found.get(id) ?? ""}\n${part.toLowerCase()}`);
  for (const talk of await conversations()) add(talk.id, talk.title);
  for (const message of await transact("readonly", (_, messages) => messages.getAll())) {
    if (found.has(message.conversation)) add(message.conversation, message.content);
  }
  return new Set([...found].filter(([, all]) => words.every((word) => all.includes(word))).map(([id]) => id));
}

export const tell = (message) => channel.postMessage(message);
export const listen = (handler) => channel.addEventListener("message", (event) => handler(event.data));

// Reads a value from localStorage, or returns `fallback`, since browsers may deny access.
export function remembered(name, fallback) {
  try {
    return JSON.parse(localStorage.getItem(`localllm.${name}`)) ?? fallback;
  } catch {
    return fallback;
  }
}

export function remember(name, value) {
  try {
    localStorage.setItem(`localllm.${name}`, JSON.stringify(value));
  } catch {
    // without storage, the setting lasts until the page is closed
  }
}
