// A conversation is a tree of messages. Editing or regenerating a message adds a sibling, so no message is lost; the
// page shows the path from a root to a leaf. The functions take a Map from ids to messages {id, parent, created, ...}.
// A deleted message {deleted: true} has no text, but keeps its place: its replies count as replies to its parent.

export function children(messages, parent, seen = new Set()) {
  const found = [];
  for (const one of messages.values()) {
    if (one.parent !== parent || seen.has(one.id)) continue;
    seen.add(one.id);
    found.push(...(one.deleted ? children(messages, one.id, seen) : [one]));
  }
  return found.sort((a, b) => a.created - b.created || (a.id < b.id ? -1 : 1));
}

export function siblings(messages, message) {
  const above = ancestors(messages, message.id).findLast((one) => one.id !== message.id && !one.deleted);
  return children(messages, above?.id ?? null);
}

// Returns the messages from the root to `leaf`, without deleted ones.
export function path(messages, leaf) {
  return ancestors(messages, leaf).filter((one) => !one.deleted);
}

// Returns the messages from the root to `leaf`. The list ends at a missing parent or at a cycle (imported files).
function ancestors(messages, leaf) {
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
