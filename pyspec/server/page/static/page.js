// A chat over the server's own API, beside live statistics of speculation.

import { events } from "./sse.js";
import { fill, sources, tint } from "./tint.js";
import { draw } from "./tree.js";

const $ = (id) => document.getElementById(id);
const messages = [];
let running = null; // {id, abort} of the answer that is being written

$("key").value = sessionStorage.getItem("pyspec-key") ?? "";
$("key").addEventListener("change", () => {
  sessionStorage.setItem("pyspec-key", $("key").value);
  connect();
});
$("tint").addEventListener("change", () => $("log").classList.toggle("no-tint", !$("tint").checked));

function headers(more = {}) {
  const key = $("key").value.trim();
  return key ? { ...more, Authorization: `Bearer ${key}` } : more;
}

async function ask(path, options = {}) {
  const response = await fetch(path, { ...options, headers: headers(options.headers) });
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  if (response.status === 401) $("settings").open = true;
  throw new Error(body?.error?.message ?? `the server answered ${response.status}`);
}

// ---- chat ----

function show(role, text = "") {
  const item = document.createElement("article");
  item.className = `message ${role}`;
  const name = document.createElement("b");
  name.textContent = { user: "You", assistant: "Model", error: "Error" }[role];
  const body = document.createElement("div");
  body.className = "text";
  body.textContent = text;
  item.append(name, body);
  $("log").append(item);
  $("log").scrollTop = $("log").scrollHeight;
  return { item, body };
}

function thoughts(item, body) {
  const details = document.createElement("details");
  const summary = document.createElement("summary");
  summary.textContent = "Reasoning";
  const text = document.createElement("div");
  text.className = "text";
  details.append(summary, text);
  item.insertBefore(details, body);
  return text;
}

function request() {
  const system = $("system").value.trim();
  const seed = $("seed").value;
  return {
    model: $("model").dataset.id ?? "",
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    stream: true,
    stream_options: { include_usage: true },
    temperature: Number($("temperature").value),
    max_tokens: Number($("max-tokens").value),
    ...(seed === "" ? {} : { seed: Number(seed) }),
  };
}

async function answer() {
  const id = `page-${Array.from(crypto.getRandomValues(new Uint8Array(8)), (b) => b.toString(16)).join("")}`;
  const abort = new AbortController();
  const { item, body } = show("assistant");
  const state = { id, abort, tokens: [], text: "", thought: "", body, item };
  running = state;
  busy(true);
  const watched = new AbortController();
  const watching = watch(state, watched.signal);
  await watching.opened;
  try {
    const response = await ask("/v1/chat/completions", {
      method: "POST",
      signal: abort.signal,
      headers: { "Content-Type": "application/json", "X-Request-ID": id },
      body: JSON.stringify(request()),
    });
    for await (const data of events(response)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      const delta = chunk.choices?.[0]?.delta ?? {};
      state.text += delta.content ?? "";
      state.thought += delta.reasoning_content ?? "";
      if (chunk.usage) $("cached").textContent =
        `${chunk.usage.prompt_tokens_details?.cached_tokens ?? 0} of ${chunk.usage.prompt_tokens}`;
      soon(state);
    }
    $("status").textContent = "The answer is complete.";
  } catch (error) {
    if (abort.signal.aborted) $("status").textContent = "Stopped.";
    else show("error", error.message);
  }
  await new Promise((resolve) => setTimeout(resolve, 150)); // the last steps may still be on the way
  watched.abort();
  render(state);
  if (state.text || state.thought) messages.push({ role: "assistant", content: state.text });
  else item.remove();
  running = null;
  busy(false);
  poll();
}

function soon(state) {
  if (state.frame) return;
  state.frame = setTimeout(() => { state.frame = null; render(state); }, 40);
}

function render(state) {
  const log = $("log");
  const follow = log.scrollTop + log.clientHeight >= log.scrollHeight - 40;
  fill(state.body, state.text, state.tokens);
  if (state.thought) {
    state.thoughtBody ??= thoughts(state.item, state.body);
    fill(state.thoughtBody, state.thought, state.tokens);
  }
  if (follow) log.scrollTop = log.scrollHeight;
}

function busy(is) {
  $("send").disabled = is;
  $("stop").disabled = !is;
  if (is) $("status").textContent = "Answering …";
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("prompt").value.trim();
  if (!text || running) return;
  $("prompt").value = "";
  messages.push({ role: "user", content: text });
  show("user", text);
  answer();
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("form").requestSubmit();
  }
});
$("stop").addEventListener("click", () => running?.abort.abort());
$("clear").addEventListener("click", () => {
  running?.abort.abort();
  messages.length = 0;
  $("log").replaceChildren();
  $("status").textContent = "";
  $("prompt").focus();
});

// ---- speculation ----

// Follows the steps of one answer; `opened` settles once nothing can be missed any more.
function watch(state, signal) {
  let open;
  const opened = new Promise((resolve) => { open = resolve; });
  const follow = async () => {
    const response = await ask("/v1/speculation/stream", { signal });
    open();
    for await (const data of events(response)) {
      const event = JSON.parse(data);
      if (event.request !== state.id || event.type !== "step") continue;
      state.tokens.push(...event.tokens);
      state.tree = event.tree;
      soon(state);
      tree(event.tree);
    }
  };
  follow().catch(() => {}).finally(open); // without it the answer is merely not tinted
  return { opened };
}

let drawn = 0;
function tree(value) {
  if (!value || performance.now() - drawn < 120) return;
  drawn = performance.now();
  draw($("tree"), $("tree-text"), value);
}

function bars(shares) {
  const rows = shares.map((share, index) => {
    const row = document.createElement("tr");
    const depth = document.createElement("th");
    depth.scope = "row";
    depth.textContent = index + 1;
    const meter = document.createElement("meter");
    meter.value = share;
    meter.setAttribute("aria-label", `accepted at depth ${index + 1}`);
    const bar = document.createElement("td");
    bar.append(meter);
    const figure = document.createElement("td");
    figure.textContent = `${Math.round(100 * share)} %`;
    row.append(depth, bar, figure);
    return row;
  });
  $("depths").tBodies[0].replaceChildren(...rows);
}

function legend() {
  const entries = ["target", ...sources()].map((source) => {
    const entry = document.createElement("li");
    entry.textContent = source === "target" ? "the model itself" : source;
    const colour = tint(source);
    if (colour) entry.className = `s${colour}`;
    return entry;
  });
  if (entries.length !== $("legend").childElementCount) $("legend").replaceChildren(...entries);
}

async function poll() {
  try {
    const found = await (await ask("/v1/speculation")).json();
    const { total, speed } = found;
    $("per-step").textContent = total.steps ? total.tokens_per_step.toFixed(2) : "–";
    $("speed").textContent = speed.tokens_per_second ? speed.tokens_per_second.toFixed(0) : "–";
    const about = { measured: "", fitted: "≈ ", bound: "≥ ", unknown: "" }[speed.plain_is];
    $("plain").textContent = speed.plain ? `${about}${speed.plain.toFixed(0)}` : "–";
    $("ratio").textContent = speed.ratio
      ? `${speed.plain_is === "bound" ? "≤ " : ""}${speed.ratio.toFixed(2)} ×` : "–";
    bars(total.acceptance_by_depth);
    Object.keys(total.acceptance_by_source).forEach(tint);
    legend();
    const last = found.slots.sort((a, b) => b.last_step - a.last_step)[0];
    if (!running && last) tree(last.tree);
  } catch { /* the next one may succeed */ }
}

async function connect() {
  try {
    const { data } = await (await ask("/v1/models")).json();
    const { draft } = await (await ask("/v1/speculation")).json();
    $("model").dataset.id = data[0].id;
    $("model").textContent = `${data[0].id}, drafting with ${draft}`;
    $("settings").open = false;
  } catch (error) {
    $("model").textContent = error.message;
  }
  poll();
}

connect();
setInterval(() => { if (!document.hidden && running) poll(); }, 500);
setInterval(() => { if (!document.hidden && !running) poll(); }, 3000);
$("prompt").focus();
