// The list of conversations: search, open, rename, delete, export, import.

import { $, announce, ask, complain, download, element, iconButton } from "./dom.js";
import * as store from "./store.js";
import { asMarkdown, exported, imported } from "./transfer.js";
import { counted } from "./units.js";

const NARROW = "(max-width: 50rem)"; // the media query in style.css

export class Sidebar {
  constructor(chat) {
    this.chat = chat;
    $("new").addEventListener("click", () => this.open(null));
    $("search").addEventListener("input", () => this.show());
    $("search").addEventListener("keydown", (event) => {
      if (event.key === "ArrowDown" || event.key === "Enter") $("conversations").querySelector("button")?.focus();
    });
    $("conversations").addEventListener("keydown", (event) => this.arrows(event));
    $("open-sidebar").addEventListener("click", () => this.toggle());
    $("close-sidebar").addEventListener("click", () => this.toggle(false));
    $("shade").addEventListener("click", () => this.toggle(false));
    $("export-all").addEventListener("click", async () => this.export(await store.conversations(), "localllm-conversations"));
    $("save-markdown").addEventListener("click", () => this.saveMarkdown());
    $("import").addEventListener("click", () => $("import-file").click());
    $("import-file").addEventListener("change", () => this.import());
    this.toggle(!this.narrow(), false);
    matchMedia(NARROW).addEventListener("change", () => this.toggle(!this.narrow(), false));
  }

  narrow() {
    return matchMedia(NARROW).matches;
  }

  toggle(open = document.body.classList.contains("sidebar-closed"), focus = true) {
    document.body.classList.toggle("sidebar-closed", !open);
    $("open-sidebar").setAttribute("aria-expanded", String(open));
    $("shade").hidden = !open;
    $("main").inert = open && this.narrow(); // the open list covers the page, so focus must stay in it
    if (focus && this.narrow()) $(open ? "search" : "open-sidebar").focus();
  }

  async open(id) {
    await this.chat.open(id);
    if (this.narrow()) this.toggle(false, false);
    $("prompt").focus();
  }

  arrows(event) {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const all = [...$("conversations").querySelectorAll(".open")];
    const at = all.indexOf(document.activeElement.closest("li")?.querySelector(".open"));
    (all[at + step] ?? (step < 0 ? $("search") : all[at]))?.focus();
  }

  async show() {
    const words = $("search").value.trim();
    const all = await store.conversations();
    const found = words ? await store.search(words) : null;
    if (words !== $("search").value.trim()) return; // the search text has changed, so a newer search shows its result
    const listed = found ? all.filter((talk) => found.has(talk.id)) : all;
    const focused = document.activeElement?.closest?.("#conversations li")?.dataset.id;
    $("conversations").replaceChildren(...listed.map((talk) => this.row(talk)));
    if (!listed.length) $("conversations").append(element("li", { class: "none" }, words ? "Nothing found" : "No conversations yet"));
    if (focused) $("conversations").querySelector(`[data-id="${CSS.escape(focused)}"] .open`)?.focus();
    if (words) announce(`${listed.length} found`);
  }

  row(talk) {
    const current = talk.id === this.chat.talk?.id;
    return element("li", { "data-id": talk.id, class: current ? "current" : "" },
      element("button", { type: "button", class: "open", title: talk.title, "aria-current": current ? "page" : false, onclick: () => this.open(talk.id) }, talk.title),
      element("span", { class: "tools" },
        iconButton("edit", `Rename ${talk.title}`, () => this.rename(talk)),
        iconButton("save", `Export ${talk.title}`, () => this.export([talk], "localllm-conversation")),
        iconButton("bin", `Delete ${talk.title}`, () => this.remove(talk))));
  }

  async rename(talk) {
    const title = await ask({ title: "Rename the conversation", label: "Title", value: talk.title, yes: "Rename" });
    if (title) await this.chat.rename(talk.id, title.slice(0, 200));
  }

  async remove(talk) {
    if ((await ask({ title: `Delete “${talk.title}”?`, yes: "Delete", danger: true })) === null) return;
    await this.chat.remove(talk.id);
    announce("Deleted");
    $("search").focus();
  }

  async export(talks, name) {
    const all = await Promise.all(talks.map(async (talk) => ({ ...talk, messages: [...(await store.messagesOf(talk.id)).values()] })));
    download(`${name}-${new Date().toISOString().slice(0, 10)}.json`, exported(all));
  }

  // Downloads the branch that the page shows.
  saveMarkdown() {
    const title = this.chat.talk?.title ?? "New chat";
    const name = title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 60) || "conversation";
    download(`${name}.md`, asMarkdown(title, this.chat.path), "text/markdown");
  }

  async import() {
    const file = $("import-file").files[0];
    $("import-file").value = "";
    if (!file) return;
    try {
      const found = imported(await file.text());
      for (const { talk, messages } of found) await store.save([talk], messages);
      announce(`${counted(found.length, "conversation")} imported`);
      await this.show();
      if (found.length === 1) await this.open(found[0].talk.id);
    } catch (error) {
      complain(`${file.name} could not be imported: ${error.message}`);
    }
  }
}
