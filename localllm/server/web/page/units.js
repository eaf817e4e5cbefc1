// Texts for numbers: sizes, durations and counts.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

// Returns a size such as "4.6 GiB", as the command line shows it.
export function size(bytes) {
  let at = 0;
  for (; bytes >= 1024 && at < UNITS.length - 1; at += 1) bytes /= 1024;
  return `${at ? bytes.toFixed(1) : Math.round(bytes)} ${UNITS[at]}`;
}

// Returns a parameter count such as "8.0B".
export const parameters = (count) => (count >= 1e9 ? `${(count / 1e9).toFixed(1)}B` : `${Math.max(1, Math.round(count / 1e6))}M`);

export const duration = (seconds) => (seconds < 0.95 ? `${Math.max(1, Math.round(seconds * 1000))} ms` : `${seconds.toFixed(1)} s`);

// Returns the remaining time of a download, rounded to what matters.
export function remaining(seconds) {
  if (seconds < 90) return `${Math.max(1, Math.round(seconds))} s left`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min left`;
  return seconds < 360_000 ? `${Math.round(seconds / 3600)} h left` : "more than four days left";
}

export const counted = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
