// Which source a token came from, as a colour; and text cut into tokens of known sources.

const known = [];

export function tint(source) {
  if (source === "target") return "";
  if (!known.includes(source)) known.push(source);
  return String(known.indexOf(source) % 5);
}

export const sources = () => known;

// Fills `element` with `text`; tokens are [{text, sources}] as the model gave them, of which the
// text may leave out parts (tags of reasoning, a stop string).
export function fill(element, text, tokens) {
  const raw = tokens.map((token) => token.text).join("");
  let at = raw.startsWith(text) || text.startsWith(raw) ? 0 : raw.indexOf(text.slice(0, 64));
  if (at < 0) {
    element.textContent = text;
    return;
  }
  const parts = [];
  let shown = 0;
  for (const token of tokens) {
    const skip = Math.min(at, token.text.length);
    at -= skip;
    const piece = token.text.slice(skip);
    if (!piece) continue;
    const rest = text.slice(shown, shown + piece.length);
    if (!rest || !piece.startsWith(rest)) break;
    shown += rest.length;
    const span = document.createElement("span");
    span.textContent = rest;
    span.title = token.sources.join(", ");
    span.dataset.source = token.sources.join(" ");
    const colour = tint(token.sources[0]);
    if (colour) span.className = `s${colour}`;
    parts.push(span);
  }
  element.replaceChildren(...parts, text.slice(shown));
}
