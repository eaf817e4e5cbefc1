// TeX in answers: $a$, \(a\), $$a$$ and \[a\] become formulas. KaTeX creates the elements itself, after the sanitizer
// has run, so the page's policy needs no exception for inline styles. A formula that KaTeX cannot read stays text.

import "./vendor/katex.min.js";

const LONGEST = 2000; // maximum characters of a formula, since the time to read it grows with its length
const DEEPEST = 300; // maximum nesting of a formula's elements; Chromium crashes on about 1000
const OPTIONS = { throwOnError: true, trust: false, strict: "ignore", maxSize: 20, maxExpand: 500 };
// As in pandoc, $ opens before a character that is not a space, and closes after one if no digit follows, so that
// "$5 or $6" is text. A formula contains no blank line.
const TEX = String.raw`((?:\\[^\n]|[^\\$\n]|\n(?!\s*\n)){1,${LONGEST}}?)`;
const DOLLARS = String.raw`((?:\\[^\n]|[^\\$\u0060\n]){0,${LONGEST}}?[^\s\\$\u0060])`;
const INLINE = [new RegExp(String.raw`^\$(?![\s$])${DOLLARS}\$(?!\d)`), new RegExp(String.raw`^\\\(${TEX}\\\)`)];
const DISPLAY = [new RegExp(String.raw`^\$\$${TEX}\$\$`), new RegExp(String.raw`^\\\[${TEX}\\\]`)];
const LINES = DISPLAY.map((one) => new RegExp(String.raw`${one.source}[ \t]*(?:\n+|$)`)); // a block of its own ends its line

const escaped = (text) => text.replace(/[&<>"']/g, (one) => `&#${one.charCodeAt(0)};`);

function rule(name, level, start, patterns, display) {
  return {
    name,
    level,
    start: (text) => text.match(start)?.index,
    tokenizer(text) {
      for (const pattern of patterns) {
        const found = pattern.exec(text);
        if (found?.[1].trim()) return { type: name, raw: found[0] };
      }
      return undefined;
    },
    renderer: ({ raw }) => `<span class="${display ? "display_" : "inline_"}">${escaped(raw)}</span>`,
  };
}

export const mathRules = [
  rule("mathBlock", "block", /(?<=\n)(?:\$\$|\\\[)/, LINES, true),
  rule("mathDisplay", "inline", /\$\$|\\\[/, DISPLAY, true),
  rule("mathInline", "inline", /\$|\\\(/, INLINE, false),
];

function depth(tree) {
  let level = [tree], count = 0;
  for (; level.length; count += 1) level = level.flatMap((node) => node.children ?? []);
  return count;
}

// Replaces the sources of formulas by formulas. Only the rules above create these classes.
export function typeset(fragment) {
  for (const place of fragment.querySelectorAll("span.inline_, span.display_")) {
    const displayMode = place.className === "display_";
    const source = place.textContent.trim();
    const tex = source.replace(/^(\$\$?|\\[([])|(\$\$?|\\[)\]])$/g, "");
    place.className = displayMode ? "formula display" : "formula";
    try {
      const tree = globalThis.katex.__renderToDomTree(tex, { ...OPTIONS, displayMode });
      if (depth(tree) > DEEPEST) throw new Error("The formula is nested too deeply.");
      place.replaceChildren(tree.toNode());
      if (displayMode) place.tabIndex = 0; // focusable, so that the arrow keys scroll a wide formula
    } catch (error) {
      place.textContent = source;
      place.title = error.message;
    }
  }
}
