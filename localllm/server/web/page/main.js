// The entry point of the page: creates the chat and its views, loads the model list, and handles global shortcuts.

import { Chat } from "./chat.js";
import { Composer } from "./composer.js";
import { $, announce, complain, fillIcons } from "./dom.js";
import { MessageView } from "./messages.js";
import { Models } from "./models.js";
import { Picker } from "./picker.js";
import { Settings, showTheme } from "./settings.js";
import { Sidebar } from "./sidebar.js";

const HEARD = 600; // maximum characters of a finished answer announced to screen readers

showTheme();
fillIcons();
let messages, composer, sidebar, picker;
const models = new Models();
const chat = new Chat(models, {
  shown: () => {
    picker.show();
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
picker = new Picker(chat, models, () => chat.events.shown());
composer = new Composer(chat, messages, picker);
sidebar = new Sidebar(chat);
const showModels = () => picker.refresh().then(() => chat.events.shown(), (error) => complain(error.message));
const settings = new Settings(chat, showModels);

$("open-shortcuts").addEventListener("click", () => $("shortcuts").showModal());

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

await chat.open(named()).catch((error) => complain(`Conversations cannot be saved in this browser: ${error.message}`));
if (!sidebar.narrow()) $("prompt").focus();
await showModels();
document.documentElement.dataset.ready = "true";
