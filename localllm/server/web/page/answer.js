// One answer: the request body for a path of messages, and a writer that builds the message from the streamed chunks.

const SAVE_EVERY = 400; // minimum milliseconds between two saves of a streamed message

const MEDIA = /^data:(?:(image)\/(?:png|jpeg|webp|gif|bmp)|(audio)\/[\w.+-]+)(?:;[\w.=-]+)*;base64,[A-Za-z0-9+/=]*$/;

// Returns "image" or "audio" for a data URL of a picture or a sound that a server can read, and "" for everything else.
export const mediaKind = (media) => {
  const found = typeof media === "string" ? MEDIA.exec(media) : null;
  return found?.[1] ?? found?.[2] ?? "";
};

function mediaPart(file) {
  if (mediaKind(file.media) === "image") return { type: "image_url", image_url: { url: file.media } };
  return { type: "input_audio", input_audio: { data: file.media.split(",")[1] } };
}

export const fileText = (file) => mediaKind(file.media) ? `\n\n[${file.name}]` : `\n\nFile ${file.name}:\n${fence(file.text)}\n${file.text}\n${fence(file.text)}`;

// Returns a code fence longer than any run of backticks in the text, so that the file cannot close the code block.
function fence(text) {
  const longest = Math.max(2, ...(text.match(/`{3,}/g) ?? []).map((one) => one.length));
  return "`".repeat(longest + 1);
}

function wireMessage(message) {
  if (message.role === "tool") return { role: "tool", tool_call_id: message.call, content: message.content };
  if (message.role === "user") {
    const [media, texts] = [true, false].map((wanted) => (message.files ?? []).filter((file) => Boolean(file.media) === wanted));
    const text = message.content + texts.map(fileText).join("");
    return { role: "user", content: media.length ? [...media.map(mediaPart), { type: "text", text }] : text };
  }
  const made = { role: "assistant", content: message.content };
  if (message.thought) made.reasoning_content = message.thought;
  if (message.calls?.length) {
    made.tool_calls = message.calls.map((call) => ({ id: call.id, type: "function", function: { name: call.name, arguments: call.arguments || "{}" } }));
  }
  return made;
}

// Returns the request body for the next message of a path. Dropped messages are skipped, and answers without content
// (failed or stopped).
export function requestBody(path, settings, model) {
  const said = path.filter((one) => !one.dropped && (one.role !== "assistant" || one.content || one.calls?.length));
  const system = settings.system ? [{ role: "system", content: settings.system }] : [];
  const tools = settings.tools ? { tools: JSON.parse(settings.tools) } : {};
  const thinking = settings.thinking ? { reasoning_effort: settings.thinking } : {};
  return { model, messages: [...system, ...said.map(wireMessage)], ...settings.sampling, ...thinking, ...tools };
}

// Adds chunks to a message. `changed` runs after each chunk, `save` at most every 400 ms; the caller saves at the end.
export class Writer {
  constructor(message, changed, save) {
    this.message = message;
    this.changed = changed;
    this.save = save;
    this.saved = this.started = performance.now();
  }

  take(chunk) {
    const message = this.message;
    const choice = chunk.choices?.[0];
    const delta = choice?.delta ?? {};
    if (chunk.prompt_progress) message.progress = chunk.prompt_progress;
    if (chunk.timings) message.timings = chunk.timings;
    if (delta.reasoning_content) {
      this.begin();
      message.thought += delta.reasoning_content;
    }
    if (delta.content) {
      this.begin();
      if (message.thought && message.thoughtSeconds === undefined) message.thoughtSeconds = this.seconds();
      message.content += delta.content;
    }
    for (const part of delta.tool_calls ?? []) this.call(part);
    if (choice?.finish_reason) message.finish = choice.finish_reason;
    if (chunk.usage) message.stats = statistics(chunk, this.first);
    this.changed(message);
    if (performance.now() - this.saved > SAVE_EVERY) {
      this.saved = performance.now();
      this.save(message);
    }
  }

  begin() {
    this.first ??= this.seconds();
    delete this.message.progress;
  }

  seconds() {
    return (performance.now() - this.started) / 1000;
  }

  call({ index, id, function: named }) {
    this.begin();
    const call = (this.message.calls[index] ??= { id: id ?? `call_${index}`, name: "", arguments: "" });
    call.name += named?.name ?? "";
    call.arguments += named?.arguments ?? "";
  }
}

function statistics({ usage, timings }, first) {
  return {
    tokens: usage.completion_tokens,
    prompt: usage.prompt_tokens,
    cached: usage.prompt_tokens_details?.cached_tokens ?? 0,
    rate: timings?.predicted_per_second ?? 0,
    promptRate: timings?.prompt_per_second ?? 0,
    first: first ?? 0,
  };
}
