// A conversation is a tree of messages: an edit or another answer is a sibling, and nothing is lost. What is shown is
// the path from a root to a leaf. Functions over a Map from ids to messages {id, parent, created, ...}.

export function children(messages, parent) {
  return [...messages.values()].filter((one) => one.parent === parent).sort((a, b) => a.created - b.created || (a.id < b.id ? -1 : 1));
}

export function siblings(messages, message) {
  return children(messages, message.parent);
}

// The messages from the root to `leaf`. A parent that is missing, or a circle in an imported file, ends it.
export function path(messages, leaf) {
  const found = [], seen = new Set();
  for (let one = messages.get(leaf); one && !seen.has(one.id); one = messages.get(one.parent)) {
    seen.add(one.id);
    found.unshift(one);
  }
  return found;
}

// The leaf below a message that was made last.
export function newestLeaf(messages, id) {
  const seen = new Set();
  let below = children(messages, id);
  while (below.length && !seen.has(id)) {
    seen.add(id);
    id = below.at(-1).id;
    below = children(messages, id);
  }
  return id;
}
