// The settings dialog: system prompt, sampling and tools of the conversation; theme and API key of this browser.

import { currentKey, properties, setKey } from "./api.js";
import { $, element } from "./dom.js";
import { remember, remembered } from "./store.js";

export const FIELDS = [ // request field, label, minimum, maximum, step, explanation
  ["temperature", "Temperature", 0, 10, "any", "Randomness. 0 always picks the most likely token; values above 1 get erratic."],
  ["top_p", "Top p", 0, 1, "any", "Sample from the most likely tokens whose probabilities add up to this."],
  ["top_k", "Top k", 0, 1000000, 1, "Sample from this many of the most likely tokens. 0: all."],
  ["min_p", "Min p", 0, 1, "any", "Skip tokens less likely than this fraction of the most likely one."],
  ["repeat_penalty", "Repeat penalty", 0, 10, "any", "Makes recent tokens less likely. 1: off."],
  ["presence_penalty", "Presence penalty", -2, 2, "any", "Makes tokens that have already appeared less likely. 0: off."],
  ["frequency_penalty", "Frequency penalty", -2, 2, "any", "The same, but stronger with each repetition. 0: off."],
  ["seed", "Seed", -1, 4294967295, 1, "The same seed and settings give the same answer. -1: random."],
  ["max_tokens", "Maximum tokens", 1, 10000000, 1, "Maximum length of an answer. A token is about three quarters of an English word."],
];

export const EFFORTS = ["", "none", "low", "medium", "high"]; // values of reasoning_effort; "": the server's default
const WORDS = { seed: { 4294967295: "random" }, max_tokens: { "-1": "no limit" } }; // values with a special meaning, and their display text

export function showTheme() {
  const theme = remembered("theme", "");
  if (["light", "dark"].includes(theme)) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
}

export class Settings {
  constructor(chat, changed) {
    this.chat = chat;
    this.changed = changed; // called if the API key has changed
    this.inputs = new Map();
    for (const [name, label, min, max, step, explanation] of FIELDS) {
      const input = element("input", { type: "number", min, max, step, id: `set-${name}`, "aria-describedby": `about-${name}` });
      this.inputs.set(name, input);
      $("set-sampling").append(element("div", {}, element("label", {}, label, input), element("small", { id: `about-${name}` }, explanation)));
    }
    $("open-settings").addEventListener("click", () => this.open());
    $("save-settings").addEventListener("click", (event) => this.save(event));
  }

  open() {
    const { system, sampling, tools, thinking } = this.chat.settings;
    $("set-system").value = system;
    $("set-tools").value = tools;
    for (const [name, input] of this.inputs) input.value = sampling[name] ?? "";
    $("set-thinking").value = thinking ?? "";
    $("set-theme").value = remembered("theme", "");
    $("set-key").value = currentKey();
    $("settings-error").hidden = true;
    $("settings").showModal();
    this.showUsual();
  }

  // Shows the server's defaults as placeholders of the empty fields.
  async showUsual() {
    for (const input of this.inputs.values()) input.placeholder = "";
    const found = (await properties(this.chat.model ?? "")).params ?? {};
    for (const [name, input] of this.inputs) {
      const value = found[name === "max_tokens" ? "n_predict" : name];
      if (typeof value === "number") input.placeholder = name in WORDS && value in WORDS[name] ? WORDS[name][value] : String(+value.toPrecision(6));
    }
  }

  async save(event) {
    if (!$("settings").querySelector("form").checkValidity()) return; // the browser reports the invalid field
    const problem = toolsProblem($("set-tools").value);
    if (problem) {
      event.preventDefault();
      $("settings-error").textContent = problem;
      $("settings-error").hidden = false;
      return;
    }
    const given = [...this.inputs].filter(([, input]) => input.value !== "").map(([name, input]) => [name, input.valueAsNumber]);
    remember("theme", $("set-theme").value);
    showTheme();
    const key = $("set-key").value.trim();
    if (key !== currentKey()) {
      setKey(key);
      this.changed();
    }
    await this.chat.change({
      system: $("set-system").value.trim(),
      sampling: Object.fromEntries(given),
      thinking: $("set-thinking").value,
      tools: $("set-tools").value.trim(),
    });
  }
}

function toolsProblem(text) {
  if (!text.trim()) return "";
  try {
    return Array.isArray(JSON.parse(text)) ? "" : "Tools: expected a JSON list.";
  } catch (error) {
    return `Tools: not JSON. ${error.message}`;
  }
}
