// From Markdown to safe elements. Models write hostile text, too: HTML in it is shown as text, and what the Markdown
// library makes goes through the sanitizer with a short list of tags. Images would load from elsewhere: they are links.

import "./vendor/purify.min.js";
import hljs from "./vendor/highlight.min.js";
import { Marked, Tokenizer } from "./vendor/marked.esm.js";
import { copy, element } from "./dom.js";

const TAGS = "p br hr h1 h2 h3 h4 h5 h6 strong em del code pre blockquote ul ol li a table thead tbody tr th td span sub sup kbd".split(" ");
const BARE = /^<\/?(br|sub|sup|kbd)\s*\/?>$/i; // HTML that is not shown as text
const DEEPEST = 50; // nested quotes, lists, emphasis and links; what is deeper stays text, because parsing recurses
const HIGHLIGHTED = 50_000; // characters; longer code stays plain
const purify = globalThis.DOMPurify;

const escaped = (text) => text.replace(/[&<>"']/g, (one) => `&#${one.charCodeAt(0)};`);

const renderer = {
  html({ text }) {
    return BARE.test(text.trim()) ? text.trim() : escaped(text);
  },
  image({ href, text }) {
    return `<a href="${escaped(href)}">${escaped(text || href)}</a>`;
  },
  checkbox({ checked }) {
    return checked ? "☑ " : "☐ ";
  },
  code({ text, lang }) {
    const language = (lang || "").split(/\s/)[0].toLowerCase();
    const known = hljs.getLanguage(language) && text.length <= HIGHLIGHTED;
    const inner = known ? hljs.highlight(text, { language, ignoreIllegals: true }).value : escaped(text);
    const named = /^[\w+#.-]{1,30}$/.test(language) ? ` class="language-${language}"` : "";
    return `<pre><code${named}>${inner}\n</code></pre>`;
  },
};

let depth = 0;
// A rule of Markdown whose tokens contain others. Beyond the limit it matches nothing.
function limited(rule) {
  return function (...given) {
    if (depth >= DEEPEST) return undefined;
    depth += 1;
    try {
      return Tokenizer.prototype[rule].apply(this, given);
    } finally {
      depth -= 1;
    }
  };
}
const NESTING = ["blockquote", "list", "emStrong", "del", "link", "reflink"];
const tokenizer = Object.fromEntries(NESTING.map((rule) => [rule, limited(rule)]));
const marked = new Marked({ gfm: true, breaks: false, renderer, tokenizer });

// Classes that are not the highlighter's could take on the page's own styles.
purify.addHook("uponSanitizeAttribute", (node, attribute) => {
  if (attribute.attrName !== "class") return;
  attribute.attrValue = attribute.attrValue.split(/\s+/).filter((one) => /^(hljs-[\w-]+|language-[\w+#.-]+|\w+_)$/.test(one)).join(" ");
  attribute.keepAttr = attribute.attrValue !== "";
});
purify.addHook("afterSanitizeAttributes", (node) => {
  if (node.nodeName !== "A") return;
  if (!node.hasAttribute("href")) return;
  node.setAttribute("target", "_blank");
  node.setAttribute("rel", "noopener noreferrer nofollow");
  node.setAttribute("title", node.getAttribute("href")); // where it really leads
});

function sanitized(html) {
  return purify.sanitize(html, {
    ALLOWED_TAGS: TAGS,
    ALLOWED_ATTR: ["href", "class", "align", "start"],
    ALLOWED_URI_REGEXP: /^(?:https?:\/\/|mailto:)/i, // nothing relative: links could call this server
    ADD_URI_SAFE_ATTR: ["align", "start"],
    ALLOW_DATA_ATTR: false,
    ALLOW_ARIA_ATTR: false,
    RETURN_DOM_FRAGMENT: true,
  });
}

// Buttons and frames of ours around code and tables; they are made here, not by the text.
function finish(fragment) {
  for (const pre of fragment.querySelectorAll("pre")) {
    const code = pre.querySelector("code");
    const language = code?.className.match(/language-([\w+#.-]+)/)?.[1] ?? "";
    const button = element("button", { type: "button", class: "plain", onclick: () => copy(pre.textContent.replace(/\n$/, "")) }, "Copy");
    const frame = element("div", { class: "code" }, element("div", { class: "code-head" }, element("span", {}, language), button));
    pre.tabIndex = 0; // so that the arrow keys scroll it
    pre.setAttribute("role", "region");
    pre.setAttribute("aria-label", language ? `Code, ${language}` : "Code");
    pre.replaceWith(frame);
    frame.append(pre);
  }
  for (const table of fragment.querySelectorAll("table")) {
    const frame = element("div", { class: "table", tabindex: "0", role: "region", "aria-label": "Table" });
    table.replaceWith(frame);
    frame.append(table);
  }
  return fragment;
}

// Shows a text that grows. Only the top-level blocks that changed are made again.
export class Growing {
  constructor(place) {
    this.place = place;
    this.blocks = []; // {raw, element}
  }

  show(text) {
    const tokens = marked.lexer(text);
    const definitions = JSON.stringify(tokens.links); // a later [name]: line changes earlier links
    if (definitions !== this.definitions) this.drop(0);
    this.definitions = definitions;
    const wanted = tokens.filter((token) => token.type !== "space" && token.type !== "def");
    let same = 0;
    while (same < wanted.length && same < this.blocks.length && wanted[same].raw === this.blocks[same].raw) same += 1;
    this.drop(same);
    for (const token of wanted.slice(same)) {
      const block = element("div", { class: "block" });
      block.append(finish(sanitized(marked.parser(Object.assign([token], { links: tokens.links })))));
      this.blocks.push({ raw: token.raw, element: block });
      this.place.append(block);
    }
  }

  drop(from) {
    for (const block of this.blocks.splice(from)) block.element.remove();
  }
}
