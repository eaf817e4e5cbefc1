// A conversation is a tree of messages. Editing or regenerating a message adds a sibling, so no message is lost; the
// page shows the path from a root to a leaf. The functions take a Map from ids to messages {id, parent, created, ...}.

export function children(messages, parent) {
  return [...messages.values()].filter((one) => one.parent === parent).sort((a, b) => a.created - b.created || (a.id < b.id ? -1 : 1));
}

export function siblings(messages, message) {
  return children(messages, message.parent);
}

// Returns the messages from the root to `leaf`. The path ends at a missing parent or at a cycle (imported files).
export function path(messages, leaf) {
  const found = [], seen = new Set();
  for (let one = messages.get(leaf); one && !seen.has(one.id); one = messages.get(one.parent)) {
    seen.add(one.id);
    found.unshift(one);
  }
  return found;
}

// Returns the leaf below a message, following the newest child at each level.
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
