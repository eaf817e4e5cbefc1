// The entry point of the page: creates the chat and its views, loads the model list, and handles global shortcuts.

import * as api from "./api.js";
import { Chat } from "./chat.js";
import { Composer } from "./composer.js";
import { $, announce, complain, element, fillIcons } from "./dom.js";
import { MessageView } from "./messages.js";
import { Settings, showTheme } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { remember, remembered } from "./store.js";

const HEARD = 600; // maximum characters of a finished answer announced to screen readers

showTheme();
fillIcons();
let messages, composer, sidebar;
const chat = new Chat({
  shown: () => {
    messages.show();
    composer.show();
    sidebar.show();
    $("save-markdown").hidden = !chat.path.length;
    const title = chat.talk?.title ?? "New chat";
    $("title").textContent = title;
    document.title = chat.talk ? `${title} · localllm` : "localllm";
    const hash = chat.talk ? `#${chat.talk.id}` : "";
    if (location.hash !== hash) history.pushState(null, "", hash || location.pathname);
    if (chat.writing) announce("Writing the answer");
  },
  message: (message) => messages.grow(message),
  listed: () => sidebar.show(),
  measured: () => composer.showContext(),
  failed: complain,
  finished: (message) => {
    if (message.status === "failed") return; // the error note has the role alert, so it is announced already
    const text = message.content.slice(0, HEARD);
    announce(`${message.status === "stopped" ? "Stopped" : "Answer"}: ${text}`);
  },
});
messages = new MessageView(chat);
composer = new Composer(chat, messages);
sidebar = new Sidebar(chat);
const settings = new Settings(chat, showModels);

async function showModels() {
  try {
    const names = await api.models();
    const last = remembered("model", "");
    $("model").replaceChildren(...names.map((name) => element("option", { value: name }, name)));
    if (names.includes(last)) $("model").value = last;
    $("model").disabled = names.length < 2;
    chooseModel();
  } catch (error) {
    complain(error.message);
  }
}

function chooseModel() {
  chat.model = $("model").value;
  $("welcome-model").textContent = chat.model || "a model on this server";
}

$("open-shortcuts").addEventListener("click", () => $("shortcuts").showModal());
$("model").addEventListener("change", () => {
  chooseModel();
  composer.showContext();
  remember("model", chat.model);
});

const SHORTCUTS = [
  [(event) => event.key === "Escape" && chat.writing && !document.querySelector("dialog[open]"), () => chat.stop()],
  [(event) => (event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "k", () => {
    sidebar.toggle(true, false);
    $("search").focus();
  }],
  [(event) => (event.ctrlKey || event.metaKey) && event.shiftKey && event.key.toLowerCase() === "o", () => sidebar.open(null)],
  [(event) => (event.ctrlKey || event.metaKey) && event.key === ",", () => settings.open()],
  [(event) => (event.ctrlKey || event.metaKey) && event.key === "/", () => $("shortcuts").showModal()],
  [(event) => event.key === "?" && !event.target.closest?.("input, textarea, select"), () => $("shortcuts").showModal()],
  [(event) => event.key === "Escape" && sidebar.narrow() && $("main").inert, () => sidebar.toggle(false)],
];
document.addEventListener("keydown", (event) => {
  if (document.querySelector("dialog[open]")) return;
  const found = SHORTCUTS.find(([fits]) => fits(event));
  if (!found) return;
  event.preventDefault();
  found[1]();
});

const named = () => location.hash.slice(1) || null;
addEventListener("popstate", () => chat.open(named()));
addEventListener("unhandledrejection", (event) => complain(event.reason?.message ?? String(event.reason)));

await chat.open(named()).catch((error) => complain(`This browser does not keep conversations: ${error.message}`));
if (!sidebar.narrow()) $("prompt").focus();
await showModels();
document.documentElement.dataset.ready = "true";
