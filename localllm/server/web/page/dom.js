// Creates elements and icons, and copies text. Text is never parsed as HTML here.

export const $ = (id) => document.getElementById(id);

// element("button", {class: "plain", onclick: f}, "Text", child): attributes by name, functions as listeners.
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== undefined && value !== null) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

export function icon(name) {
  const found = $("icons").content.querySelector(`[data-name="${name}"]`);
  return element("span", { class: "icon" }, found.cloneNode(true));
}

export function iconButton(name, label, onclick, more = {}) {
  const kind = name === "bin" ? "plain delete" : "plain";
  return element("button", { type: "button", class: kind, "aria-label": label, title: label, onclick, ...more }, icon(name));
}

// Replaces the placeholders in index.html with their icons.
export function fillIcons() {
  for (const place of document.querySelectorAll("[data-icon]")) place.replaceWith(icon(place.dataset.icon));
}

// Announces a text to screen readers only. An open dialog makes the rest of the page inert, so it has a place of its own.
export function announce(text) {
  (document.querySelector("dialog[open] [data-announce]") ?? $("status")).textContent = text;
}

// Shows an error until it is closed; screen readers announce it immediately. A text that is shown already is not repeated.
const MOST_NOTICES = 5;
export function complain(text) {
  const place = $("problems");
  for (const one of [...place.children]) if (one.firstChild.textContent === text) one.remove();
  const notice = element("div", { class: "notice", role: "alert" }, element("span", {}, text),
    iconButton("close", "Close the message", () => {
      notice.remove();
      (place.querySelector("button") ?? $("prompt")).focus();
    }));
  place.append(notice);
  while (place.children.length > MOST_NOTICES) place.firstChild.remove();
}

// navigator.clipboard exists only in secure contexts (localhost or HTTPS), so other pages copy a selection.
export async function copy(text) {
  try {
    if (navigator.clipboard) await navigator.clipboard.writeText(text);
    else copyBySelection(text);
    announce("Copied");
    return true;
  } catch {
    complain("The browser blocked copying.");
    return false;
  }
}

function copyBySelection(text) {
  const area = element("textarea", { class: "unseen", "aria-hidden": "true" });
  area.value = text;
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  if (!done) throw new Error("not copied");
}

// Asks a question in a dialog; `text` explains it. Returns the entered text, "" for a confirmation without text, or null on cancel.
export function ask({ title, text = "", label = "", value = "", yes, danger = false }) {
  const dialog = $("ask"), input = $("ask-value");
  $("ask-title").textContent = title;
  $("ask-text").hidden = !text;
  $("ask-text").textContent = text;
  $("ask-label").hidden = !label;
  $("ask-label").firstElementChild.textContent = label;
  $("ask-yes").textContent = yes;
  $("ask-yes").classList.toggle("danger", danger);
  input.value = value;
  dialog.returnValue = "cancel";
  dialog.showModal();
  if (label) input.select();
  else $("ask-yes").focus();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      const agreed = dialog.returnValue === "yes";
      resolve(agreed ? (label ? input.value.trim() : "") : null);
    }, { once: true });
  });
}

export function download(name, text, type = "application/json") {
  const address = URL.createObjectURL(new Blob([text], { type }));
  const link = element("a", { href: address, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}
