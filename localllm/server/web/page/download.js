// The download of one model: reads the stream of /api/pull, and computes progress, rate and remaining time. The stream is
// not trusted: it can have any content, and may never end.

import * as api from "./api.js";

const WINDOW_MS = 8000; // the rate is the mean of this time
const SHOW_MS = 200; // pause between two reports of the progress
const SILENT_MS = 15_000; // time without news after which the page says so
const MOST_PARTS = 10_000; // maximum files of one model

const number = (value) => (Number.isFinite(value) && value > 0 ? value : 0);

export class Download {
  // `changed` runs whenever the text or the state changes.
  constructor(name, changed) {
    this.name = name;
    this.changed = changed;
    this.state = "running"; // running, done, cancelled, failed
    this.status = "Asking for the model…";
    this.error = "";
    this.parts = new Map(); // digest -> {total, completed} in bytes
    this.samples = []; // [time, completed bytes]
    this.heard = this.told = performance.now();
    this.stopping = new AbortController();
  }

  get total() {
    return [...this.parts.values()].reduce((sum, part) => sum + part.total, 0);
  }

  get completed() {
    return [...this.parts.values()].reduce((sum, part) => sum + part.completed, 0);
  }

  // Returns the share of the download that is complete, or null as long as the size is unknown.
  get share() {
    return this.total ? Math.min(1, this.completed / this.total) : null;
  }

  // Returns the bytes per second of the last seconds, or 0.
  get rate() {
    const [first, last] = [this.samples[0], this.samples.at(-1)];
    return first && last[0] > first[0] ? Math.max(0, (1000 * (last[1] - first[1])) / (last[0] - first[0])) : 0;
  }

  get silent() {
    return this.state === "running" && performance.now() - this.heard > SILENT_MS;
  }

  async run() {
    const watch = setInterval(() => this.tell(), 1000);
    try {
      await api.pull(this.name, this.stopping.signal, (line) => this.take(line));
      if (this.state === "running") throw new Error("The connection ended before the download did.");
    } catch (error) {
      this.state = this.stopping.signal.aborted ? "cancelled" : "failed";
      this.error = this.state === "failed" ? error.message : "";
    } finally {
      clearInterval(watch);
    }
    this.tell();
    return this.state === "done";
  }

  cancel() {
    this.stopping.abort();
  }

  // Reads one line of the stream. Returns whether it was the last one.
  take(line) {
    if (typeof line?.error === "string") throw new Error(line.error.slice(0, 2000));
    if (typeof line?.status !== "string") throw new Error("The server's answer could not be read.");
    this.heard = performance.now();
    this.status = line.status.slice(0, 200);
    if (line.status === "success") this.state = "done";
    const total = number(line.total);
    if (total) this.count(String(line.digest ?? "").slice(0, 200), total, Math.min(total, number(line.completed)));
    if (this.state === "running" && performance.now() - this.told > SHOW_MS) this.tell();
    return this.state === "done";
  }

  tell() {
    this.told = performance.now();
    this.changed(this);
  }

  count(part, total, completed) {
    if (this.parts.size >= MOST_PARTS && !this.parts.has(part)) throw new Error("The model has too many files.");
    if (!this.parts.get(part)?.completed) this.samples = []; // what an earlier download left counts at once, and would distort the rate
    this.parts.set(part, { total, completed });
    const now = performance.now();
    this.samples = this.samples.filter(([time]) => now - time < WINDOW_MS);
    this.samples.push([now, this.completed]);
  }
}
