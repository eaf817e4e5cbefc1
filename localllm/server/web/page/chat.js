// The open conversation and its actions: send, stop, edit, regenerate, continue, and switch between branches.
// Generation continues when another conversation is opened. The callbacks in `events` update the views.

import { requestBody, Writer } from "./answer.js";
import * as api from "./api.js";
import * as store from "./store.js";
import { newestLeaf, path } from "./tree.js";

const TITLE_LENGTH = 60;
const LOOK_MS = 500; // pause between two looks at the state of a model that has not begun its answer
const ANSWER_MS = 700; // time for another tab to report that it is writing a message

// Returns the length of a message and its files.
const characters = (one) => one.content.length + (one.files ?? []).reduce((sum, file) => sum + file.text.length, 0);

export class Chat {
  constructor(models, events) {
    this.models = models;
    this.events = events; // {shown, message, listed, failed, finished, measured}
    this.contexts = new Map(); // model -> length of its context in tokens; 0: unknown
    this.running = new Map(); // message id -> {message, stop} of each answer that this tab is generating
    this.alive = new Set(); // ids of messages that another tab is writing
    this.talk = null;
    this.adjusted = null; // {last, tokens}: estimated change since the message `last` was answered
    this.messages = new Map();
    this.defaults = store.remembered("defaults", { system: "", sampling: {}, thinking: "", tools: "" });
    store.listen((told) => this.told(told));
  }

  get path() {
    return this.talk ? path(this.messages, this.talk.leaf) : [];
  }

  // The name of the model that the next answer comes from; "" if there is none.
  get model() {
    return this.models.for(this.talk?.model ?? "");
  }

  // Uses a model for the open conversation, and for new conversations.
  async use(model) {
    this.models.prefer(model);
    if (!this.talk) return;
    this.talk.model = model;
    await store.save([this.talk]);
  }

  get settings() {
    return this.talk?.settings ?? this.defaults;
  }

  get writing() {
    const last = this.path.at(-1);
    return last !== undefined && this.running.has(last.id);
  }

  async open(id) {
    const talk = id ? await store.conversation(id) : null;
    this.messages = talk ? await store.messagesOf(id) : new Map();
    for (const message of this.messages.values()) {
      const own = this.running.get(message.id);
      if (own) this.messages.set(message.id, own.message);
    }
    this.talk = talk ?? null;
    this.events.shown();
    await this.findOrphans();
  }

  // Marks unfinished answers that no tab is writing as interrupted, since a reload ended them. Their text is kept.
  async findOrphans() {
    const left = [...this.messages.values()].filter((one) => one.status === "streaming" && !this.running.has(one.id));
    if (!left.length) return;
    for (const one of left) {
      this.alive.delete(one.id);
      store.tell({ who: one.id });
    }
    const id = this.talk.id;
    await new Promise((resolve) => setTimeout(resolve, ANSWER_MS));
    const dead = left.filter((one) => !this.alive.has(one.id));
    if (!dead.length) return;
    await store.interrupt(dead.map((one) => one.id));
    store.tell({ changed: id });
    if (this.talk?.id === id) await this.open(id);
  }

  async told({ changed, who, writing }) {
    if (who !== undefined && this.running.has(who)) store.tell({ writing: who });
    if (writing !== undefined) this.alive.add(writing);
    if (changed === undefined) return;
    this.events.listed();
    const talk = await store.conversation(changed);
    if (!talk) this.stopAll(changed); // another tab has deleted the conversation
    if (changed !== this.talk?.id) return;
    if (!talk) return this.open(null);
    const stored = await store.messagesOf(changed);
    if (changed !== this.talk?.id) return;
    for (const id of this.running.keys()) stored.delete(id); // this tab's copy of a message that it is writing is newer
    this.messages = new Map([...this.messages, ...stored]); // this tab's new messages may not be stored yet
    this.talk = { ...talk, leaf: newestLeaf(this.messages, this.talk.leaf) }; // each tab stays on its branch
    this.events.shown();
  }

  async ensureTalk(text) {
    if (this.talk) return;
    const now = Date.now();
    const title = text.trim().split("\n")[0].slice(0, TITLE_LENGTH) || "New chat";
    this.talk = { id: store.newId(), title, created: now, updated: now, leaf: null, settings: structuredClone(this.defaults) };
    this.messages = new Map();
  }

  add(fields) {
    const last = Math.max(0, ...[...this.messages.values()].map((one) => one.created));
    const created = Math.max(Date.now(), last + 1); // strictly increasing, because siblings are sorted by it
    const message = { id: store.newId(), conversation: this.talk.id, created, content: "", status: "done", ...fields };
    this.messages.set(message.id, message);
    this.talk.leaf = message.id;
    this.talk.model = this.model;
    this.talk.updated = Date.now();
    return message;
  }

  async send(text, files = []) {
    await this.ensureTalk(text || files[0]?.name || "");
    const message = this.add({ role: "user", parent: this.talk.leaf, content: text, files });
    await Promise.all([store.save([this.talk], [message]), this.answer(message.id)]);
  }

  // Sends an edited message. The original message and its replies remain as a branch.
  async edit(id, text) {
    const old = this.messages.get(id);
    const message = this.add({ role: "user", parent: old.parent, content: text, files: old.files ?? [] });
    await Promise.all([store.save([this.talk], [message]), this.answer(message.id)]);
  }

  // Replaces the text of an answer. The original answer remains as a branch.
  async rewrite(id, text) {
    const { parent, thought, calls, model } = this.messages.get(id);
    const message = this.add({ role: "assistant", parent, content: text, thought, calls, model });
    await store.save([this.talk], [message]);
    this.events.shown();
  }

  // Deletes a message; the replies to it stay.
  async erase(id) {
    this.running.get(id)?.stop();
    const { conversation, parent, role, created } = this.messages.get(id);
    const message = { id, conversation, parent, role, created, content: "", status: "done", deleted: true };
    this.messages.set(id, message);
    await store.save([this.talk], [message]);
    this.events.shown();
  }

  // Leaves the oldest messages out of later requests, until about half of the context is free. They stay on the page.
  async dropOldest() {
    const sent = this.path.filter((one) => !one.dropped);
    const { used, context } = this.fill;
    const whole = sent.reduce((sum, one) => sum + characters(one), 0);
    let wanted = whole * (1 - context / 2 / used); // characters, as many per token as on average
    const dropped = [];
    const last = sent.findLastIndex((one) => one.role === "user"); // the last question and its answer stay
    for (const one of sent.slice(0, Math.max(0, last))) {
      if (wanted <= 0 && one.role === "user") break; // the rest begins with a question
      dropped.push(Object.assign(one, { dropped: true }));
      wanted -= characters(one);
    }
    this.adjust(dropped, -1, used / whole);
    await store.save([this.talk], dropped);
    this.events.shown();
    return dropped.length;
  }

  // Sends a dropped message again with later requests.
  async include(id) {
    const message = this.messages.get(id);
    const sent = this.path.filter((one) => !one.dropped);
    if (this.fill) this.adjust([message], 1, this.fill.used / sent.reduce((sum, one) => sum + characters(one), 1));
    delete message.dropped;
    await store.save([this.talk], [message]);
    this.events.shown();
  }

  // Estimates the tokens of messages that are no longer sent (sign -1), or sent again (1), until the next answer.
  adjust(messages, sign, perCharacter) {
    const last = this.measured?.id;
    const before = this.adjusted?.last === last ? this.adjusted.tokens : 0;
    const tokens = messages.reduce((sum, one) => sum + characters(one), 0) * perCharacter;
    this.adjusted = { last, tokens: before + sign * Math.round(tokens) };
  }

  // Returns the last message of the branch with a number of tokens.
  get measured() {
    return this.path.findLast((one) => one.stats || one.refused);
  }

  // Returns {used, context, about} in tokens, from the last answer of the branch or its refusal, or null if they are
  // unknown. `about`: `used` is an estimate, because messages were dropped since.
  get fill() {
    const last = this.measured;
    if (!last) return null;
    const change = this.adjusted?.last === last.id ? this.adjusted.tokens : 0;
    const used = (last.refused?.prompt ?? last.stats.prompt + last.stats.tokens) + change;
    const context = last.refused?.context ?? this.contexts.get(this.model);
    return context > 0 ? { used, context, about: change !== 0 } : null;
  }

  async measure() {
    if (this.contexts.has(this.model)) return;
    const { n_ctx: context } = await api.properties(this.model);
    this.contexts.set(this.model, context ?? 0);
    this.events.measured();
  }

  async again(id) {
    await this.answer(this.messages.get(id).parent);
  }

  async sendResults(id, results) {
    let parent = id;
    const made = results.map(({ call, content }) => {
      const message = this.add({ role: "tool", parent, call, content });
      parent = message.id;
      return message;
    });
    await Promise.all([store.save([this.talk], made), this.answer(parent)]); // in parallel, since the user may switch conversations
  }

  // Continues a stopped answer: the server continues the last message.
  async proceed(id) {
    const message = this.messages.get(id);
    message.status = "streaming";
    message.model = this.model;
    delete message.error;
    delete message.refused;
    await this.write(message, this.talk, path(this.messages, id));
  }

  async answer(parent) {
    const before = path(this.messages, parent);
    const message = this.add({ role: "assistant", parent, thought: "", calls: [], status: "streaming", model: this.model });
    await this.write(message, this.talk, before);
  }

  async write(message, talk, before) {
    const stopping = new AbortController();
    this.running.set(message.id, { message, stop: () => stopping.abort() });
    const writer = new Writer(message, (one) => this.events.message(one), (one) => this.keep(talk.id, one));
    this.events.shown();
    const watch = this.watchLoading(message);
    try {
      await store.save([talk], [message]);
      this.events.listed();
      await api.stream(requestBody(before, talk.settings, this.model), stopping.signal, (chunk) => writer.take(chunk));
      message.status = message.finish === "length" ? "length" : "done";
    } catch (error) {
      message.status = stopping.signal.aborted ? "stopped" : "failed";
      if (message.status === "failed") message.error = error.message;
      if (error.context) message.refused = { prompt: error.prompt, context: error.context };
    }
    clearInterval(watch);
    delete message.loading;
    delete message.progress;
    delete message.timings;
    this.running.delete(message.id);
    await this.keep(talk.id, message);
    if (this.talk?.id === talk.id) this.events.shown();
    this.events.finished(message);
    if (message.status !== "failed") await this.measure();
  }

  // Counts the seconds that the server loads the model before an answer begins.
  watchLoading(message) {
    const began = performance.now();
    const look = async () => {
      if (message.progress || message.timings || message.content || message.thought) return clearInterval(watch);
      const state = await api.stateOf(message.model).catch(() => "");
      message.loading = state === "loading" ? (performance.now() - began) / 1000 : undefined;
      this.events.message(message);
    };
    const watch = setInterval(look, LOOK_MS);
    return watch;
  }

  async keep(id, message) {
    try {
      if (await store.conversation(id)) await store.save([], [message]); // unless the conversation has been deleted
    } catch (error) {
      this.events.failed(`The answer could not be saved: ${error.message}`);
    }
  }

  stop() {
    const last = this.path.at(-1);
    if (last) this.running.get(last.id)?.stop();
  }

  stopAll(conversation) {
    for (const own of this.running.values()) if (own.message.conversation === conversation) own.stop();
  }

  async choose(id) {
    this.talk.leaf = newestLeaf(this.messages, id);
    await store.save([this.talk], [], true);
    this.events.shown();
  }

  async rename(id, title) {
    const talk = id === this.talk?.id ? this.talk : await store.conversation(id);
    await store.save([{ ...talk, title }]);
    if (id === this.talk?.id) this.talk.title = title;
    this.events.listed();
    this.events.shown();
  }

  async remove(id) {
    this.stopAll(id);
    await store.remove(id);
    if (this.talk?.id === id) await this.open(null);
    this.events.listed();
  }

  // Saves settings for the open conversation, and as the defaults for new conversations.
  async change(settings) {
    this.defaults = settings;
    store.remember("defaults", settings);
    if (!this.talk) return;
    this.talk.settings = structuredClone(settings);
    await store.save([this.talk]);
  }
}
