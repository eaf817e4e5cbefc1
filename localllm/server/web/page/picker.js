// The model of the conversation: its name in the header, and the dialog that lists the server's models, downloads and
// deletes them. Names and messages from the server are only ever shown as text.

import * as api from "./api.js";
import { $, announce, ask, element, iconButton } from "./dom.js";
import { Download } from "./download.js";
import { BUNDLED } from "./models.js";
import { parameters, remaining, size } from "./units.js";

const MOST_ROWS = 200; // maximum rows of the list; more are found by typing
const POLL_MS = 1000; // pause between two looks at a model that is loading
const SETTLES_MS = 5000; // time after a change in which the list is read again, since the server may carry it out later
const STATES = { loaded: "loaded", loading: "loading…", failed: "could not be loaded", unloaded: "" };

export class Picker {
  constructor(chat, models, changed) {
    this.chat = chat;
    this.models = models;
    this.changed = changed; // called if another model is used now
    this.download = null;
    this.settled = 0;
    $("model").addEventListener("click", () => this.open());
    $("close-models").addEventListener("click", () => $("models").close());
    $("models-filter").addEventListener("input", () => this.list());
    $("models").addEventListener("keydown", (event) => this.pressed(event));
    $("get-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.get($("get-name").value.trim());
    });
    $("stop-download").addEventListener("click", () => this.stop());
    $("resume").addEventListener("click", () => this.get(this.download.name));
    $("toy-get").addEventListener("click", () => this.open(true));
    $("gone-choose").addEventListener("click", () => this.open());
    $("gone-use").addEventListener("click", () => this.use(this.models.for("")));
  }

  // Reads the list of models again, and shows the model of the conversation.
  async refresh() {
    await this.models.refresh();
    this.show();
  }

  // Opens the dialog; with `get`, also its part that downloads.
  async open(get = false) {
    $("models-filter").value = "";
    this.fail("");
    $("models").showModal();
    $("get").open = get || this.models.chatting.length < 2;
    this.list();
    if (get) $("get-name").focus();
    await this.reload();
  }

  async reload() {
    await this.refresh().catch((error) => this.fail(error.message));
    clearTimeout(this.waiting);
    const changing = performance.now() < this.settled || this.models.list.some((one) => one.state === "loading");
    if ($("models").open && changing) this.waiting = setTimeout(() => this.reload(), POLL_MS);
  }

  // Shows the model of the conversation in the header, and whether it is gone.
  show() {
    const { models, chat } = this;
    const id = chat.model;
    const gone = models.gone(id);
    $("model").hidden = models.fixed;
    $("only-model").hidden = !models.fixed;
    $("only-model").textContent = id;
    $("model-name").textContent = id.split("/").at(-1) || "Choose a model";
    $("model").classList.toggle("lost", gone);
    $("model").title = id;
    $("welcome-model").textContent = id || "a model on this server";
    $("set-model").hidden = !models.fixed || !models.management.reason;
    $("set-model").textContent = models.management.reason;
    $("toy").hidden = id !== BUNDLED || !models.management.download;
    const other = models.for("");
    $("gone").hidden = !gone;
    $("gone-text").textContent = !gone ? "" : models.find(id) ? `${id} cannot chat.` : `${id} is not in this server's list of models any more.`;
    $("gone-use").hidden = !other;
    $("gone-use").textContent = `Use ${other}`;
    if ($("models").open) this.list();
  }

  use(id) {
    this.chat.use(id);
    this.show();
    this.changed();
  }

  choose(id) {
    this.use(id);
    announce(`${id} is used now`);
    $("models").close();
    $("prompt").focus();
  }

  // Fills the dialog. The focused row stays focused.
  list() {
    const { management: may } = this.models;
    const words = $("models-filter").value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = this.models.list.filter((one) => words.every((word) => facts(one).toLowerCase().includes(word)));
    const focused = document.activeElement?.closest("#models-list li")?.dataset.id;
    const at = document.activeElement?.dataset.does;
    $("models-list").replaceChildren(...found.slice(0, MOST_ROWS).map((one) => this.row(one)));
    const left = found.length - MOST_ROWS;
    $("models-more").textContent = left > 0 ? `${left.toLocaleString("en")} more. Type to find them.` : words.length && !found.length ? "Nothing found" : "";
    if (focused !== undefined) {
      const row = [...$("models-list").children].find((one) => one.dataset.id === focused);
      (row?.querySelector(`[data-does="${at}"]`) ?? row?.querySelector("button:not(:disabled)") ?? $("models-filter")).focus();
    }
    $("get").hidden = !may.download;
    $("get-off").hidden = may.download;
    $("get-off").textContent = may.reason;
    const here = new Set(this.models.list.map((one) => one.id.toLowerCase()));
    const busy = this.download?.state === "running";
    $("get-button").disabled = busy;
    $("known").replaceChildren(...may.models.map((one) => this.offer(one, here, busy)));
  }

  row(one) {
    const { management: may } = this.models;
    const state = one.chats ? STATES[one.state] ?? one.state : "for embeddings";
    const about = facts(one, false);
    const button = element("button", { type: "button", class: "open", "data-does": "choose", disabled: !one.chats, "aria-current": one.id === this.chat.model ? "true" : false,
      onclick: () => this.choose(one.id) },
    element("span", { class: "name" }, one.id), element("small", {}, about && state ? `${about} · ` : about, state ? element("span", { class: `state ${one.state}` }, state) : null));
    const tools = [];
    if (may.load) {
      const loaded = one.state === "loaded";
      const change = () => this.attempt(loaded ? "Not unloaded" : "Not loaded", () => (loaded ? api.unload : api.load)(one.id));
      if (loaded || one.state !== "loading") {
        tools.push(element("button", { type: "button", class: "plain", "data-does": "load", "aria-label": `${loaded ? "Unload" : "Load"} ${one.id}`, onclick: change }, loaded ? "Unload" : "Load"));
      }
    }
    if (may.download && one.id !== BUNDLED) tools.push(iconButton("bin", `Delete ${one.id}`, () => this.remove(one), { "data-does": "delete" }));
    return element("li", { "data-id": one.id, class: one.id === this.chat.model ? "current" : "" }, button, element("span", { class: "tools" }, ...tools));
  }

  offer(one, here, busy) {
    const have = here.has(one.name.toLowerCase()) || here.has(one.reference.toLowerCase());
    return element("li", {}, element("span", { class: "open" }, element("span", { class: "name" }, one.name), element("small", {}, one.size ? `${size(one.size)} · ${one.licence}` : one.reference)),
      have ? element("small", {}, "on this server")
        : element("button", { type: "button", "aria-label": `Download ${one.name}`, disabled: busy, onclick: () => this.get(one.name) }, "Download"));
  }

  fail(text) {
    $("models-error").hidden = !text;
    $("models-error").textContent = text;
  }

  // Runs a request that changes a model, shows its error after the words in `failed`, and reads the list again.
  async attempt(failed, work) {
    this.fail("");
    await work().catch((error) => this.fail(`${failed}: ${error.message}`));
    this.settled = performance.now() + SETTLES_MS;
    await this.reload();
  }

  async remove(one) {
    const text = one.base ? `Its base, ${one.base}, stays.` : `This deletes its files from the server's disk: ${size(one.bytes)}.`;
    const sure = await ask({ title: `Delete ${one.id}?`, text, yes: "Delete", danger: true });
    if (sure === null) return;
    await this.attempt("Not deleted", () => api.remove(one.id));
    if (!this.models.find(one.id)) announce("Deleted");
    $("models-filter").focus();
  }

  async get(name) {
    if (!name || this.download?.state === "running") return;
    const asked = this.models.management.models.find((one) => one.name === name.toLowerCase());
    const before = new Set(this.models.list.map((one) => one.id));
    const talk = this.chat.talk?.id, began = Date.now();
    this.download = new Download(name, () => this.progress());
    this.progress();
    this.list();
    announce(`Downloading ${name}`);
    $("stop-download").focus();
    const done = await this.download.run();
    await this.reload();
    this.list();
    if (!done) return;
    const names = [name, asked?.reference ?? name].map((one) => one.toLowerCase().replace(/:latest$/, ""));
    const added = this.models.chatting.filter((one) => !before.has(one.id));
    const made = added.find((one) => names.includes(one.id.toLowerCase())) ?? added[0] ?? this.models.chatting.find((one) => names.includes(one.id.toLowerCase()));
    if (!made) return;
    announce(`${made.id} is ready`);
    $("get-name").value = "";
    const now = this.chat.talk;
    if (talk === now?.id || (!talk && now.created >= began)) this.use(made.id);
    else this.models.prefer(made.id); // the user has opened another conversation, which keeps its model
  }

  stop() {
    if (this.download.state === "running") return this.download.cancel();
    this.download = null;
    this.progress();
    $("models-filter").focus();
  }

  // Shows the download in the dialog, and its share in the header.
  progress() {
    const one = this.download;
    const running = one?.state === "running";
    $("download").hidden = !one;
    $("model-progress").textContent = running && one.share !== null ? `${Math.floor(100 * one.share)} %` : running ? "…" : "";
    if (!one) return;
    const bar = $("download-bar");
    $("download-name").textContent = one.name;
    bar.hidden = one.state === "done";
    if (one.share === null) bar.removeAttribute("value");
    else bar.value = one.share;
    $("download-text").textContent = told(one);
    $("download-error").textContent = `Download failed: ${one.error}`;
    $("download-error").hidden = !one.error;
    $("stop-download").textContent = running ? "Cancel" : "Close";
    $("resume").hidden = running || one.state === "done";
    $("resume").textContent = one.completed ? "Resume" : "Try again";
  }

  pressed(event) {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    const all = [...$("models-list").querySelectorAll(".open:not(:disabled)")];
    if (event.target === $("models-filter") && event.key === "Enter") {
      event.preventDefault();
      all[0]?.click();
    } else if (step && (event.target === $("models-filter") || event.target.closest("#models-list"))) {
      event.preventDefault();
      const at = all.indexOf(event.target.closest("li")?.querySelector(".open"));
      (all[at + step] ?? (step < 0 ? $("models-filter") : all[at]))?.focus();
    }
  }
}

// Returns what is known about a model: its name, number of parameters, quantization and size.
function facts(one, named = true) {
  return [named ? one.id : "", one.parameters ? parameters(one.parameters) : "", one.quantization, one.bytes ? size(one.bytes) : ""].filter(Boolean).join(" · ");
}

function told(one) {
  if (one.state === "done") return "Downloaded.";
  if (one.state === "cancelled") return one.completed ? "Cancelled. The part already downloaded is kept." : "Cancelled.";
  const parts = one.share === null ? [one.status] : [`${size(one.completed)} of ${size(one.total)}`];
  if (one.state === "failed") return one.completed ? `Stopped at ${parts[0]}.` : "";
  if (one.silent) parts.push("nothing has arrived for a while");
  else if (one.rate) parts.push(`${size(one.rate)}/s`, remaining((one.total - one.completed) / one.rate));
  if (one.share === 1) return one.status; // for example, checking the file
  return parts.join(" · ");
}
