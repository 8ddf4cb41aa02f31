// The last draft tree as SVG: depth to the right, siblings below each other.

import { tint } from "./tint.js";

const WIDTH = 84, HEIGHT = 24, GAP = 22;
const shown = (text) => JSON.stringify(text).slice(1, -1).replaceAll(" ", "␣") || "∅";

function make(name, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

function places(parents) {
  const depth = [], row = [], children = parents.map(() => []);
  parents.forEach((parent, node) => {
    depth[node] = parent < 0 ? 0 : depth[parent] + 1;
    if (parent >= 0) children[parent].push(node);
  });
  let rows = 0;
  const walk = (node) => {
    row[node] = rows;
    children[node].forEach((child, index) => {
      if (index) rows += 1;
      walk(child);
    });
  };
  walk(0);
  return { depth, row, rows: rows + 1 };
}

export function draw(element, caption, tree) {
  const { depth, row, rows } = places(tree.parents);
  const kept = new Set(tree.accepted);
  const x = (node) => depth[node] * (WIDTH + GAP) + 2, y = (node) => row[node] * (HEIGHT + 8) + 2;
  const width = (Math.max(...depth) + 1) * (WIDTH + GAP), height = rows * (HEIGHT + 8) + 4;
  const svg = make("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img",
    "aria-labelledby": "tree-text" });
  tree.parents.forEach((parent, node) => {
    if (parent < 0) return;
    const from = [x(parent) + WIDTH, y(parent) + HEIGHT / 2], to = [x(node), y(node) + HEIGHT / 2];
    const bend = (from[0] + to[0]) / 2;
    svg.append(make("path", { d: `M${from}C${bend},${from[1]} ${bend},${to[1]} ${to}`,
      class: kept.has(node) ? "kept" : "" }));
  });
  tree.tokens.forEach((token, node) => {
    const source = node ? tint(tree.sources[node][0]) : "";
    const label = shown(token);
    const group = make("g", { class: kept.has(node) ? "kept" : "lost" },
      make("rect", { x: x(node), y: y(node), width: WIDTH, height: HEIGHT, rx: 5,
        class: source === "" ? "" : `f${source}` }),
      make("text", { x: x(node) + 6, y: y(node) + 16 }, label.length > 11 ? `${label.slice(0, 10)}…` : label),
      make("title", {}, node ? `${label} from ${tree.sources[node].join(", ")}, p ${tree.probabilities[node]}` : label));
    svg.append(group);
  });
  element.replaceChildren(svg);
  const path = tree.accepted.slice(1).map((node) => `“${shown(tree.tokens[node])}”`).join(" ");
  caption.textContent = `${tree.tokens.length - 1} drafts after “${shown(tree.tokens[0])}”, `
    + `${tree.accepted.length - 1} accepted${path ? `: ${path}` : ""}; then the model’s own “${shown(tree.bonus)}”.`;
}
