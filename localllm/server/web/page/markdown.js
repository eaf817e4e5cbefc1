// Converts Markdown to safe DOM elements. Model output is untrusted: its HTML is shown as text, and the generated HTML
// is sanitized with a short list of allowed tags. Images become links, since they would load from other hosts.

import "./vendor/purify.min.js";
import hljs from "./vendor/highlight.min.js";
import { Marked, Tokenizer } from "./vendor/marked.esm.js";
import { copy, element } from "./dom.js";
import { mathRules, typeset } from "./math.js";

const TAGS = "p br hr h1 h2 h3 h4 h5 h6 strong em del code pre blockquote ul ol li a table thead tbody tr th td span sub sup kbd".split(" ");
const BARE = /^<\/?(br|sub|sup|kbd)\s*\/?>$/i; // the only HTML tags that are not shown as text
const DEEPEST = 50; // maximum nesting; deeper markup stays text, because the parser is recursive
const HIGHLIGHTED = 50_000; // maximum characters of highlighted code
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
// Wraps a Markdown rule whose tokens can nest. Beyond the maximum nesting, the rule matches nothing.
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
const marked = new Marked({ gfm: true, breaks: true, renderer, tokenizer, extensions: mathRules });

// Only classes of the highlighter are kept, because other classes could select styles of this page.
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
  node.setAttribute("title", node.getAttribute("href")); // show the real target of the link
});

function sanitized(html) {
  return purify.sanitize(html, {
    ALLOWED_TAGS: TAGS,
    ALLOWED_ATTR: ["href", "class", "align", "start"],
    ALLOWED_URI_REGEXP: /^(?:https?:\/\/|mailto:)/i, // no relative URLs, which could send requests to this server
    ADD_URI_SAFE_ATTR: ["align", "start"],
    ALLOW_DATA_ATTR: false,
    ALLOW_ARIA_ATTR: false,
    RETURN_DOM_FRAGMENT: true,
  });
}

// Adds frames and copy buttons around code and tables, and typesets formulas, after sanitizing, so that the text cannot create them.
function finish(fragment) {
  for (const pre of fragment.querySelectorAll("pre")) {
    const code = pre.querySelector("code");
    const language = code?.className.match(/language-([\w+#.-]+)/)?.[1] ?? "";
    const button = element("button", { type: "button", class: "plain", onclick: () => copy(pre.textContent.replace(/\n$/, "")) }, "Copy");
    const wrap = element("button", { type: "button", class: "plain", "aria-pressed": "false", onclick: () => {
      wrap.setAttribute("aria-pressed", String(pre.classList.toggle("wrapped")));
    } }, "Wrap");
    const frame = element("div", { class: "code" }, element("div", { class: "code-head" }, element("span", {}, language), element("span", {}, wrap, button)));
    pre.tabIndex = 0; // focusable, so that the arrow keys scroll the code
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
  typeset(fragment);
  return fragment;
}

// Shows streamed Markdown. Only the top-level blocks that have changed are rendered again.
export class Growing {
  constructor(place) {
    this.place = place;
    this.blocks = []; // {raw, element}
  }

  show(text) {
    const tokens = marked.lexer(text);
    const definitions = JSON.stringify(tokens.links); // a new link definition ([name]: URL) changes earlier links
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
