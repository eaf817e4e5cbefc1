// Conversations in this browser: IndexedDB has a record per conversation and one per message, so that two tabs which
// write in one conversation lose nothing. Other tabs are told of every change. Small settings are in localStorage.

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

// Write records in one transaction; `quiet` tells no other tab.
export async function save(talks, messages = [], quiet = false) {
  await transact("readwrite", (talkStore, messageStore) => {
    for (const talk of talks) talkStore.put(talk);
    for (const message of messages) messageStore.put(message);
  });
  if (!quiet) tell({ changed: talks[0]?.id ?? messages[0]?.conversation });
}

// Mark messages that no tab writes as cut off. One that was finished meanwhile stays as it is.
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

// The ids of conversations whose title or messages have all the words of `text`.
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

// localStorage, which browsers may refuse.
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
    // then it lasts until the page is closed
  }
}
