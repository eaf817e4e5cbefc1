// Shows the messages of the current branch. An article is rendered again only if its message has changed, so that
// focus, selection and an open editor survive while an answer streams.

import { mediaKind } from "./answer.js";
import { $, announce, complain, copy, element, icon, iconButton } from "./dom.js";
import { Growing } from "./markdown.js";
import { siblings } from "./tree.js";
import { counted, duration } from "./units.js";

const NEAR = 80; // maximum distance from the end, in pixels, at which the view keeps scrolling
const SLOWER = 4; // pause between renders, as a multiple of the last render time, so that the page stays responsive

export class MessageView {
  constructor(chat) {
    this.chat = chat;
    this.shown = new Map(); // message id -> {article, signature, growing, ...}
    this.waiting = new Map();
    this.follow = true;
    $("scroll").addEventListener("scroll", () => {
      this.follow = this.distance() < NEAR;
      $("to-end").hidden = this.follow;
    });
    $("to-end").addEventListener("click", () => this.toEnd());
    new ResizeObserver(() => this.follow && this.toEnd()).observe($("scroll")); // notices and the message box take its height
  }

  distance() {
    const place = $("scroll");
    return place.scrollHeight - place.scrollTop - place.clientHeight;
  }

  toEnd() {
    this.follow = true;
    $("scroll").scrollTop = $("scroll").scrollHeight;
    $("to-end").hidden = true;
  }

  // Shows all messages of the current branch.
  show() {
    const wanted = this.chat.path;
    const ids = new Set(wanted.map((one) => one.id));
    for (const [id, one] of this.shown) {
      if (ids.has(id)) continue;
      one.article.remove();
      this.shown.delete(id);
    }
    const place = $("messages");
    wanted.forEach((message, number) => {
      const article = this.article(message, number === wanted.length - 1);
      if (place.children[number] !== article) place.insertBefore(article, place.children[number] ?? null);
    });
    $("welcome").hidden = wanted.length > 0;
    if (this.follow) this.toEnd();
  }

  // Renders a streaming message again after a pause that grows with its render time.
  grow(message) {
    if (this.waiting.has(message.id) || !this.shown.has(message.id)) return;
    const wait = Math.max(30, SLOWER * (this.shown.get(message.id).took ?? 0));
    this.waiting.set(message.id, setTimeout(() => {
      this.waiting.delete(message.id);
      const one = this.shown.get(message.id);
      if (!one || one.editing) return;
      const began = performance.now();
      this.fill(one, message);
      if (this.follow) this.toEnd();
      one.took = performance.now() - began;
    }, wait));
  }

  article(message, last) {
    const around = siblings(this.chat.messages, message);
    const signature = JSON.stringify([message.status, message.content.length, message.thought?.length, message.calls, message.error, message.dropped,
      this.writer(message), asked(this.chat.path, message), around.length, around.indexOf(message), last, this.chat.running.has(message.id)]);
    let one = this.shown.get(message.id);
    if (one && (one.signature === signature || one.editing)) return one.article;
    if (!one) {
      one = this.skeleton(message);
      this.shown.set(message.id, one);
    }
    one.signature = signature;
    this.fill(one, message);
    const writing = message.status === "streaming";
    one.article.setAttribute("aria-busy", String(writing));
    one.article.classList.toggle("dropped", Boolean(message.dropped));
    one.foot.replaceChildren(...(writing ? [] : this.buttons(message, around)));
    one.after.replaceChildren(...(last && !writing ? this.results(message) : []));
    return one.article;
  }

  // Returns the name of an answer's model, or "" if the next answer comes from the same one.
  writer(message) {
    return message.role === "assistant" && message.model && message.model !== this.chat.model ? message.model : "";
  }

  skeleton(message) {
    const name = { user: "You", assistant: "Answer", tool: "Result" }[message.role] ?? "Message";
    const one = { body: element("div", { class: "body" }), foot: element("div", { class: "foot" }), after: element("div") };
    one.article = element("article", { class: `message ${name.toLowerCase()}`, "data-id": message.id, "aria-label": name }, one.body, one.after, one.foot);
    return one;
  }

  fill(one, message) {
    if (message.role === "assistant") return this.fillAnswer(one, message);
    const content = element("div", { class: "plain-text" }, message.content);
    const files = (message.files ?? []).map((file) =>
      mediaKind(file.media) === "image" ? element("img", { class: "picture", src: file.media, alt: file.name })
      : file.media ? element("div", { class: "file" }, icon("clip"), file.name)
      : element("details", { class: "file" }, element("summary", {}, icon("clip"), file.name), element("pre", { tabindex: "0" }, file.text)));
    const label = message.role === "tool" ? [element("div", { class: "note" }, "Result of the call")] : [];
    one.body.replaceChildren(...label, ...(message.content ? [content] : []), ...files);
  }

  fillAnswer(one, message) {
    if (!one.parts) {
      one.thought = element("div", { class: "thought-text" });
      one.summary = element("summary");
      one.parts = {
        thought: element("details", { class: "thought" }, one.summary, one.thought),
        text: element("div", { class: "markdown" }),
        calls: element("div"),
        note: element("div", { class: "note" }),
      };
      one.growing = new Growing(one.parts.text);
      one.body.replaceChildren(...Object.values(one.parts));
    }
    const { thought, calls, note } = one.parts;
    const writing = message.status === "streaming";
    thought.hidden = !message.thought;
    if (message.thought) {
      one.thought.textContent = message.thought;
      const seconds = message.thoughtSeconds;
      one.summary.textContent = seconds !== undefined ? `Thought for ${duration(seconds)}` : writing ? "Thinking…" : "Thoughts";
    }
    one.growing.show(message.content);
    calls.replaceChildren(...(message.calls ?? []).filter(Boolean).map(callBox));
    note.className = message.status === "failed" ? "note error" : "note";
    note.replaceChildren(...notes(message, writing), ...(message.refused ? [this.dropButton(message)] : []));
    if (message.status === "failed") note.setAttribute("role", "alert");
  }

  buttons(message, around) {
    const chat = this.chat;
    const found = [];
    if (around.length > 1) {
      const at = around.findIndex((one) => one.id === message.id);
      const go = (to, label) => iconButton(to < at ? "left" : "right", label, () => this.choose(around[to].id, to < at), { disabled: to < 0 || to >= around.length });
      found.push(element("span", { class: "branches", role: "group", "aria-label": "Branches" }, go(at - 1, "Previous branch"),
        element("span", {}, `${at + 1} / ${around.length}`), go(at + 1, "Next branch")));
    }
    if (message.dropped) {
      found.push(element("span", { class: "stats" }, "No longer sent to the model"),
        iconButton("plus", "Include in the context again", () => chat.include(message.id)));
    } else if (message.stats) found.push(element("span", { class: "stats" }, statistics(message.stats, this.writer(message))));
    found.push(iconButton("copy", "Copy", () => copy(message.content)));
    if (message.role !== "tool") found.push(iconButton("edit", "Edit", () => this.edit(message.id)));
    found.push(iconButton("bin", "Delete", () => this.erase(message.id)));
    if (message.role === "assistant") {
      if (asked(chat.path, message)) found.push(iconButton("again", "Answer again", () => chat.again(message.id)));
      const cut = ["stopped", "interrupted", "length"].includes(message.status);
      if (cut && message.content && !message.calls.length) found.push(iconButton("play", "Continue", () => chat.proceed(message.id)));
    }
    return found;
  }

  async erase(id) {
    await this.chat.erase(id);
    announce("Deleted");
    $("prompt").focus();
  }

  async choose(id, back) {
    await this.chat.choose(id);
    const buttons = this.shown.get(id)?.foot.querySelectorAll(".branches button") ?? [];
    const wanted = buttons[back ? 0 : 1];
    (wanted?.disabled ? buttons[back ? 1 : 0] : wanted)?.focus(); // the other branch has its own buttons, so move the focus there
  }

  edit(id) {
    const one = this.shown.get(id);
    const message = this.chat.messages.get(id);
    if (!one || one.editing || !message || message.role === "tool") return;
    const answer = message.role === "assistant";
    one.editing = true;
    const area = element("textarea", { "aria-label": answer ? "Edit the answer" : "Edit the message", rows: Math.min(12, message.content.split("\n").length + 1) });
    area.value = message.content;
    const close = () => {
      one.editing = false;
      if (answer) one.body.replaceChildren(...Object.values(one.parts));
      one.signature = "";
      this.show();
    };
    const cancel = () => {
      close();
      one.foot.querySelector('[aria-label="Edit"]')?.focus();
    };
    const form = element("form", { class: "editor", onsubmit: (event) => {
      event.preventDefault();
      if (!area.value.trim() && !message.files?.length) return;
      close();
      this.follow ||= !answer;
      if (answer) this.chat.rewrite(id, area.value.trim());
      else this.chat.edit(id, area.value.trim());
      $("prompt").focus();
    } }, area, element("div", { class: "bar end" },
      element("button", { type: "button", class: "plain", onclick: cancel }, "Cancel"),
      element("button", { type: "submit", class: "main" }, answer ? "Save" : "Send")));
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") cancel();
      if (event.key === "Enter" && (!answer || event.ctrlKey || event.metaKey) && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        form.requestSubmit();
      }
    });
    one.body.replaceChildren(form);
    one.foot.replaceChildren();
    area.focus();
  }

  // Returns a button that drops the oldest messages and asks again, for a prompt that did not fit the context.
  dropButton(message) {
    return element("div", { class: "bar" }, element("button", { type: "button", class: "main", onclick: async () => {
      if (await this.chat.dropOldest()) await this.chat.again(message.id);
      else complain("There is no older message to drop. Shorten the last one, or start the server with a larger context (-c).");
    } }, "Drop the oldest messages and try again"));
  }

  // Returns a form for the results of the tool calls.
  results(message) {
    const calls = (message.calls ?? []).filter(Boolean);
    if (!calls.length || message.status !== "done") return [];
    const areas = calls.map((call) => element("textarea", { rows: "2", required: true, "aria-label": `Result of ${call.name}`, placeholder: `Result of ${call.name}` }));
    const submit = (event) => {
      event.preventDefault();
      this.chat.sendResults(message.id, calls.map((call, number) => ({ call: call.id, content: areas[number].value })));
    };
    return [element("form", { class: "editor", onsubmit: submit }, ...areas,
      element("div", { class: "bar end" }, element("button", { type: "submit", class: "main" }, "Send results")))];
  }
}

// Returns whether a message precedes an answer, so that the answer can be generated again.
const asked = (path, answer) => path.findIndex((one) => one.id === answer.id) > 0;

function callBox(call) {
  let shown = call.arguments;
  try {
    shown = JSON.stringify(JSON.parse(call.arguments), null, 2);
  } catch {
    // incomplete JSON while the call is streaming
  }
  return element("div", { class: "call" }, element("div", {}, "Calls ", element("code", {}, call.name)), element("pre", { tabindex: "0", "aria-label": `Arguments of ${call.name}` }, shown));
}

function notes(message, writing) {
  if (message.status === "failed") return [`No answer: ${message.error}`];
  if (message.status === "stopped") return ["Stopped."];
  if (message.status === "interrupted") return ["Interrupted: the page was closed or reloaded."];
  if (message.status === "length") return ["Cut off: the answer reached its maximum length, or the context is full."];
  const progress = message.progress;
  if (writing && progress && progress.total > progress.processed) {
    return [`Processing the prompt: ${progress.processed} of ${progress.total} tokens`];
  }
  if (writing && message.loading !== undefined) return [`Loading ${message.model}… ${Math.round(message.loading)} s`];
  const { predicted_n: count, predicted_per_second: rate } = message.timings ?? {};
  if (writing && count > 1) return [`${count} tokens · ${rate.toFixed(1)} tokens/s`];
  return writing && !message.content && !message.thought ? [element("span", { class: "dots", role: "img", "aria-label": "Waiting for the answer" }, "…")] : [];
}

function statistics(stats, writer) {
  const parts = [writer, counted(stats.tokens, "token")].filter(Boolean);
  if (stats.rate) parts.push(`${stats.rate.toFixed(1)} tokens/s`);
  parts.push(`${stats.cached} of ${stats.prompt} prompt tokens cached`);
  if (stats.first) parts.push(`first token ${duration(stats.first)}`);
  return parts.join(" · ");
}
