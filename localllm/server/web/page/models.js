// The server's models and their states, and the model that a conversation uses.

import * as api from "./api.js";
import { remember, remembered } from "./store.js";

export const BUNDLED = "demo"; // the model that comes with localllm

export class Models {
  constructor() {
    this.list = []; // {id, state, bytes, quantization, parameters, chats}
    this.known = false; // whether the list has been read
    this.management = { models: [], load: false, download: false, reason: "" };
    this.preferred = remembered("model", ""); // the model that was chosen last, for new conversations
  }

  // Reads the list again. Throws if the server cannot be reached.
  async refresh() {
    [this.list, this.management] = await Promise.all([api.models(), api.management()]);
    this.known = true;
  }

  find(id) {
    return this.list.find((one) => one.id === id);
  }

  get chatting() {
    return this.list.filter((one) => one.chats);
  }

  // Whether there is nothing to choose: the server has one model, and cannot get another.
  get fixed() {
    return this.list.length < 2 && !this.management.download;
  }

  // Returns the model for a conversation that wants `wanted`: "" if there is none. A wanted model that has gone is
  // returned all the same, so that nobody gets another model unasked.
  for(wanted) {
    if (wanted && !(this.known && this.fixed)) return wanted;
    const chatting = this.chatting;
    const found = [wanted, this.preferred].map((id) => chatting.find((one) => one.id === id)).find(Boolean);
    return (found ?? chatting.find((one) => one.state === "loaded") ?? chatting[0])?.id ?? "";
  }

  // Whether a conversation's model is gone, or cannot chat.
  gone(id) {
    return this.known && id !== "" && !this.chatting.some((one) => one.id === id);
  }

  prefer(id) {
    this.preferred = id;
    remember("model", id);
  }
}
