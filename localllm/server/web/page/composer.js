// The message box: it grows with its text, sends and stops, and accepts files by button, drop or paste: text, pictures
// and sound.

import { mediaKind } from "./answer.js";
import { $, announce, complain, element, iconButton } from "./dom.js";
import { counted } from "./units.js";

const FILE_BYTES = 1 << 20;
const MEDIA_BYTES = 20 << 20; // a server accepts requests of 32 MiB by default, and base64 adds a third
const MOST_FILES = 20;
const SHOWN_FROM = 0.25, FULL_FROM = 0.8; // shares of the context

export class Composer {
  constructor(chat, messages, picker) {
    this.chat = chat;
    this.messages = messages;
    this.picker = picker;
    this.files = [];
    const prompt = $("prompt");
    prompt.addEventListener("input", () => this.resize());
    prompt.addEventListener("keydown", (event) => this.pressed(event));
    prompt.addEventListener("paste", (event) => this.take(event.clipboardData.files, event));
    $("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    $("stop").addEventListener("click", () => this.chat.stop());
    $("drop").addEventListener("click", () => this.drop());
    for (const example of $("examples").querySelectorAll("button")) {
      example.addEventListener("click", () => {
        prompt.value = example.textContent;
        this.send();
      });
    }
    $("attach").addEventListener("click", () => $("attach-files").click());
    $("attach-files").addEventListener("change", async () => {
      await this.take($("attach-files").files);
      $("attach-files").value = "";
      prompt.focus();
    });
    document.addEventListener("dragover", (event) => event.preventDefault());
    document.addEventListener("drop", (event) => this.take(event.dataTransfer.files, event));
  }

  pressed(event) {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      this.send();
    } else if (event.key === "ArrowUp" && !$("prompt").value) {
      const last = this.chat.path.findLast((one) => one.role === "user");
      if (last && !this.chat.writing) {
        event.preventDefault();
        this.messages.edit(last.id);
      }
    }
  }

  send() {
    const text = $("prompt").value.trim();
    if (this.chat.writing || (!text && !this.files.length)) return;
    if (!this.chat.model || this.chat.models.gone(this.chat.model)) return this.picker.open();
    const files = this.files.splice(0);
    $("prompt").value = "";
    this.resize();
    this.list();
    this.messages.follow = true;
    this.chat.send(text, files).catch((error) => complain(error.message));
  }

  resize() {
    const prompt = $("prompt");
    prompt.rows = Math.min(10, Math.max(1, prompt.value.split("\n").length));
    while (prompt.rows < 10 && prompt.scrollHeight > prompt.clientHeight + 4) prompt.rows += 1; // long lines wrap, so line breaks alone do not give the height
  }

  async take(files, event) {
    if (!files.length) return;
    event?.preventDefault();
    for (const file of files) {
      if (this.files.length >= MOST_FILES) return complain(`At most ${MOST_FILES} files can be attached to a message.`);
      if (mediaKind(`data:${file.type};base64,`)) await this.readMedia(file);
      else if (file.size > FILE_BYTES) complain(`${file.name} is larger than 1 MiB. Attach part of it instead.`);
      else await this.read(file);
    }
    this.list();
  }

  async read(file) {
    try {
      const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
      if (text.includes("\0")) throw new TypeError();
      this.files.push({ name: file.name.slice(0, 200), text });
    } catch {
      complain(`${file.name} is neither a UTF-8 text file nor a picture or a sound. PDFs and other formats can't be attached.`);
    }
  }

  async readMedia(file) {
    if (file.size > MEDIA_BYTES) return complain(`${file.name} is larger than 20 MiB. Make it smaller.`);
    const reader = new FileReader();
    const media = await new Promise((resolve) => {
      reader.addEventListener("loadend", () => resolve(reader.result));
      reader.readAsDataURL(file);
    });
    if (mediaKind(media)) this.files.push({ name: file.name.slice(0, 200), text: "", media });
    else complain(`${file.name} could not be read.`);
  }

  list() {
    const picture = (file) => (mediaKind(file.media) === "image" ? element("img", { class: "thumbnail", src: file.media, alt: "" }) : null);
    $("files").replaceChildren(...this.files.map((file, number) => element("li", {}, picture(file), file.name, iconButton("close", `Remove ${file.name}`, () => {
      this.files.splice(number, 1);
      this.list();
      $("prompt").focus();
    }))));
  }

  // Shows the stop button while an answer is generated, otherwise the send button.
  show() {
    const writing = this.chat.writing;
    const focused = document.activeElement === $("stop") || document.activeElement === $("send");
    $("send").hidden = writing;
    $("stop").hidden = !writing;
    if (focused) $("prompt").focus(); // the focused button may now be hidden
    this.showContext();
  }

  // Shows how full the context is, from a quarter on; from 80 %, also the button that drops the oldest messages.
  showContext() {
    const fill = this.chat.fill;
    const share = fill ? Math.min(1, fill.used / fill.context) : 0;
    $("context").hidden = share < SHOWN_FROM;
    $("drop").hidden = share < FULL_FROM || this.chat.writing;
    if (!fill) return;
    $("context-meter").value = share;
    $("context-text").textContent = `${fill.about ? "about " : ""}${fill.used.toLocaleString("en")} of ${fill.context.toLocaleString("en")} tokens`;
  }

  async drop() {
    const count = await this.chat.dropOldest();
    if (count) announce(`${counted(count, "message")} dropped`);
    else complain("There is no older message to drop.");
    $("prompt").focus();
  }
}
