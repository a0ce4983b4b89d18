"use strict";
const $ = (id) => document.getElementById(id);
const make = (tag, name, text) => { const node = document.createElement(tag); if (name) node.className = name; if (text !== undefined) node.textContent = text; return node; };
const IDEAS = ["What is the capital of Japan?", "Write a haiku about paper.", "Explain what a cache is to a child.", "Give me three names for a cat."];

// Settings. Of those that are empty only the longest answer is sent; for the others the server's own default holds.
const LONGEST_ANSWER = 512;
const longest = () => Number(values.max_tokens) || Math.min(LONGEST_ANSWER, server.max_total_tokens >> 1);
const FIELDS = [
  { id: "system", label: "System prompt", kind: "area", hint: "Stands before the conversation." },
  { id: "temperature", label: "Temperature", kind: "range", min: 0, max: 2, step: 0.05, value: "0.5", hint: "0 always takes the likeliest token." },
  { id: "top_p", label: "Top p", kind: "range", min: 0.05, max: 1, step: 0.05, value: "0.9" },
  { id: "top_k", label: "Top k", kind: "number", min: 0, step: 1, pair: true },
  { id: "min_p", label: "Min p", kind: "number", min: 0, max: 1, step: 0.01, pair: true },
  { id: "max_tokens", label: "Longest answer", kind: "number", min: 1, step: 1, pair: true, empty: "512" },
  { id: "seed", label: "Seed", kind: "number", min: 0, step: 1, pair: true },
  { id: "repetition_penalty", label: "Repetition penalty", kind: "number", min: 0.1, max: 5, step: 0.05, pair: true },
  { id: "stop", label: "Stop at", kind: "text", pair: true, empty: "nothing" },
  { id: "key", label: "API key", kind: "password", hint: "Only if the server asks for one. Kept in this tab." },
];
const store = {
  get: (id) => { try { return (id === "key" ? sessionStorage : localStorage).getItem("quire." + id); } catch { return null; } },
  set: (id, value) => { try { (id === "key" ? sessionStorage : localStorage).setItem("quire." + id, value); } catch { /* private windows */ } },
};
const values = {};
function drawFields() {
  const parent = $("fields"); parent.replaceChildren();
  let pair = null;
  for (const field of FIELDS) {
    values[field.id] = store.get(field.id) ?? field.value ?? "";
    const label = make("label", "field"), head = make("span", "", field.label), shown = make("output");
    const input = make(field.kind === "area" ? "textarea" : "input");
    if (field.kind !== "area") input.type = field.kind;
    for (const name of ["min", "max", "step"]) if (field[name] !== undefined) input[name] = field[name];
    input.id = "set-" + field.id;
    if (field.kind === "number" || field.kind === "text") input.placeholder = field.empty ?? "default";
    if (field.kind === "password") input.autocomplete = "off";
    const show = () => { if (field.kind === "range") shown.textContent = values[field.id] === "" ? "default" : values[field.id]; };
    input.value = values[field.id] === "" && field.kind === "range" ? 1 : values[field.id];
    input.addEventListener("input", () => { values[field.id] = input.value; store.set(field.id, input.value); show(); });
    if (field.id === "key") input.addEventListener("change", check);
    head.append(shown); label.append(head, input);
    if (field.hint) label.append(make("small", "", field.hint));
    show();
    if (field.pair) { if (!pair || pair.children.length === 2) { pair = make("div", "pair"); parent.append(pair); } pair.append(label); }
    else { pair = null; parent.append(label); }
  }
}
$("open").onclick = () => $("settings").showModal();
$("settings").addEventListener("click", (event) => { if (event.target === $("settings")) $("settings").close(); });
$("settings").addEventListener("close", () => $("input").focus());
$("reset").onclick = () => { for (const field of FIELDS) if (field.id !== "key") store.set(field.id, field.value ?? ""); drawFields(); };

// Theme: the system's until one is chosen.
const dark = matchMedia("(prefers-color-scheme: dark)");
const applyTheme = () => { document.documentElement.dataset.theme = store.get("theme") || (dark.matches ? "dark" : "light"); };
dark.addEventListener("change", applyTheme);
$("theme").onclick = () => { store.set("theme", document.documentElement.dataset.theme === "dark" ? "light" : "dark"); applyTheme(); };
applyTheme();

// The server: looked at every few seconds, so that the dot tells the truth while nobody asks anything.
const LOOK_MS = 2000, LOOK_WHEN_UP_MS = 10000, LONGEST_LOOK_MS = 8000;
let server = null, state = "connecting", looking = 0, nextLook = 0;
const isThere = () => state === "up" || state === "key";
const headers = () => ({ "content-type": "application/json", ...(values.key ? { authorization: "Bearer " + values.key } : {}) });
const ask = (path, options) => fetch(path, { headers: headers(), cache: "no-store", signal: AbortSignal.timeout(LONGEST_LOOK_MS), ...options });
async function check() {
  const number = looking += 1;  // an older look does not overrule this one
  clearTimeout(nextLook);
  const [found, text] = await look();
  if (number !== looking) return;
  show(found, text);
  nextLook = setTimeout(check, found === "up" ? LOOK_WHEN_UP_MS : LOOK_MS);
}
async function look() {
  try {
    const health = await ask("health");
    if (!health.ok) {
      const said = await health.json().catch(() => ({}));
      return [server ? "down" : "starting", said.reason || "HTTP " + health.status];
    }
    if (!isThere() || !server) server = await (await ask("info")).json();
    // Needs the key, if the server has one.
    const card = await ask("v1/models/" + encodeURIComponent(server.model_id));
    if (card.status === 401) return ["key", values.key ? "wrong API key" : "needs an API key"];
    if (card.status === 404) server = await (await ask("info")).json();  // another model is served now
    return ["up", server.model_id];
  } catch { return ["down", "cannot be reached"]; }
}
function show(found, text) {
  state = found;
  $("dot").className = "dot " + ({ up: "up", starting: "wait" }[found] ?? "down");
  $("model").textContent = $("model").title = text;
  document.title = found === "up" ? text + " · Quire" : "Quire";
  greet(); ready();
}
document.addEventListener("visibilitychange", () => { if (!document.hidden) check(); });
addEventListener("online", check);

// Text to elements. Nothing of an answer becomes markup but what is made here.
function inline(node, text) {
  text.split(/(```[^`\n]+```|``[^`\n]+``|`[^`\n]+`|\*\*[^*\n]+\*\*)/).forEach((part, index) => {  // text, marked, text, …
    if (index % 2 === 0) node.append(part);
    else if (part.startsWith("`")) node.append(make("code", "", part.replace(/^`+|`+$/g, "")));
    else node.append(make("strong", "", part.slice(2, -2)));
  });
}
const outdented = (text, by) => text.split("\n").map((line) => (line.startsWith(by) ? line.slice(by.length) : line)).join("\n");  // code in a list
function render(target, text) {
  const blocks = [];
  const parts = text.split(/^([ \t]*)```([^\n`]*)(?:\n|$)/m);  // text, indent, language, code, indent, nothing, rest, …
  parts.forEach((part, index) => {
    if (index % 3) return;
    if (index % 6 === 3) { const pre = make("pre"); pre.append(make("code", "", outdented(part.replace(/\n$/, ""), parts[index - 2]))); blocks.push(pre); return; }
    let list = null, lines = [];
    const flush = () => { if (lines.length) { const p = make("p"); inline(p, lines.join("\n")); blocks.push(p); lines = []; } };
    for (const line of part.split("\n")) {
      const item = line.match(/^\s*(?:([-*])|(\d+)[.)])\s+(.*)/), title = line.match(/^#{1,6}\s+(.*)/);
      if (item) {
        flush();
        const tag = item[1] ? "UL" : "OL";
        if (!list || list.tagName !== tag) { list = make(tag); if (item[2]) list.start = +item[2]; blocks.push(list); }
        const li = make("li"); inline(li, item[3]); list.append(li);
      } else if (title) { flush(); list = null; const h = make("h3"); inline(h, title[1]); blocks.push(h); }
      else if (!line.trim()) flush();
      else { list = null; lines.push(line); }
    }
    flush();
  });
  target.replaceChildren(...(blocks.length ? blocks : [make("p")]));
}

// The conversation.
let messages = [], running = null;
const near = () => $("scroll").scrollHeight - $("scroll").scrollTop - $("scroll").clientHeight < 80;
const down = () => { $("scroll").scrollTop = $("scroll").scrollHeight; };
const GREETINGS = {
  up: ["What would you like to know?", "What you write goes to this server and nowhere else."],
  starting: ["The server is starting…", "This page goes on by itself when the model is ready. The first start takes longest."],
  down: ["The server does not answer", "This page goes on by itself when the server is back."],
  key: ["This server asks for an API key", "Enter it in the settings."],
};
function hello() {
  const box = make("div", "hello"), ideas = make("div", "ideas");
  box.append(make("h1"), make("p"));
  for (const idea of IDEAS) { const button = make("button", "", idea); button.onclick = () => send(idea); ideas.append(button); }
  box.append(ideas); $("talk").replaceChildren(box); greet();
}
function greet() {
  const box = document.querySelector(".hello");
  if (!box) return;
  const [title, text] = GREETINGS[state] ?? GREETINGS.up;
  box.querySelector("h1").textContent = title; box.querySelector("p").textContent = text;
  box.querySelector(".ideas").hidden = !["up", "connecting"].includes(state);
}
function conversation(turns = messages) {
  const said = turns.map(({ role, content, thinking }) => (thinking ? { role, content, reasoning_content: thinking } : { role, content }));
  return values.system.trim() ? [{ role: "system", content: values.system }, ...said] : said;
}
function body() {
  const asked = { model: server.model_id, messages: conversation(), max_tokens: longest(), stream: true, stream_options: { include_usage: true } };
  for (const id of ["temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty"]) if (values[id] !== "") asked[id] = Number(values[id]);
  if (values.stop) asked.stop = [values.stop];
  return asked;
}
async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n"); rest = lines.pop();
    for (const line of lines) if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
  }
}
function fault(message, name, act) {
  const follow = near(), box = make("div", "fault"); box.setAttribute("role", "alert"); box.append(make("span", "", message));
  if (act) { const button = make("button", "", name); button.onclick = () => { if (running) return; box.remove(); act(); }; box.append(button); }
  $("talk").append(box); if (follow) down();
}
function send(text) {
  if (running || !isThere() || !text.trim()) return;
  if (!messages.length) $("talk").replaceChildren();
  const node = make("div", "mine", text);
  messages.push({ role: "user", content: text, node });
  $("talk").append(node); down();
  $("input").value = ""; grow(); $("input").focus();
  reply();
}

// A conversation that does not fit: its oldest turns can be left out of what is sent.
const number = (value) => value.toLocaleString("en");
async function count(turns) {
  const asked = { model: server.model_id, messages: conversation(turns) };
  const answer = await ask("tokenize", { method: "POST", body: JSON.stringify(asked) });
  if (!answer.ok) throw new Error((await answer.json().catch(() => ({}))).error || "HTTP " + answer.status);
  return (await answer.json()).count;
}
// With a quarter to spare, so that there is room for some more turns.
const fits = (tokens) => tokens <= server.max_input_tokens * 0.75 && tokens + longest() <= server.max_total_tokens * 0.75;
async function tooLong(control) {
  const tokens = await count(messages);
  if (running !== control) return;  // a new conversation has begun
  const isInput = tokens > server.max_input_tokens && server.max_input_tokens < server.max_total_tokens;
  const limit = isInput ? server.max_input_tokens : server.max_total_tokens;
  const what = messages.length > 1 ? "conversation" : "message";
  const plus = isInput ? "" : ` plus ${number(longest())} for the answer`;
  const text = `This ${what} is too long: ${number(tokens)} tokens${plus}; the limit is ${number(limit)}.`;
  if (messages.length > 1) fault(text, "Leave out the oldest turns", leaveOut);
  else { takeBack(); fault(text + " Make it shorter, or ask for a shorter answer in the settings."); }
}
async function leaveOut() {
  const control = running = new AbortController(); busy(true);
  const starts = messages.map(({ role }, at) => (role === "user" ? at : 0)).filter((at) => at);
  let low = 0, high = starts.length - 1, problem = "";
  try {
    while (low < high) {  // the first start from which on it fits; the last message is sent in any case
      const middle = (low + high) >> 1;
      if (fits(await count(messages.slice(starts[middle])))) high = middle; else low = middle + 1;
    }
  } catch (error) { problem = error.message; }
  if (running !== control) return;  // a new conversation has begun
  running = null; busy(false);
  if (problem) { fault(`The turns could not be counted: ${problem}`, "Try again", leaveOut); return; }
  messages.splice(0, starts[low]);
  document.querySelector(".cut")?.remove();
  messages[0].node.before(make("div", "cut", "The model no longer sees what is above this line."));
  reply();
}
async function reply() {
  document.querySelectorAll(".fault").forEach((old) => old.remove());
  const control = running = new AbortController(); busy(true);
  const box = make("div", "theirs live"), text = make("div", "text"), foot = make("div", "foot"), speed = make("span");
  const thought = make("details", "thought"), thoughtHead = make("summary"), thoughtText = make("div");
  thought.append(thoughtHead, thoughtText); thought.hidden = true;
  text.append(make("p")); foot.append(speed); box.append(thought, text, foot); $("talk").append(box); down();
  const begun = performance.now();
  let thinking = "", thoughtOut = 0, content = "", drawn = "", first = 0, pieces = 0, tokens = 0, reason = "", drawing = false, problem = "", code = "";
  const numbers = () => {
    const took = (performance.now() - first) / 1000, count = tokens || pieces, rate = count > 1 && took > 0 ? (count - 1) / took : 0;
    speed.textContent = first ? `${count} tokens · ${rate.toFixed(1)} tokens/s · first token ${((first - begun) / 1000).toFixed(2)} s` : "";
  };
  const draw = () => {
    drawing = false;
    const follow = near();
    if (thinking) {
      thought.hidden = false; thoughtText.textContent = thinking;
      thoughtHead.textContent = thoughtOut ? `Thought for ${((thoughtOut - first) / 1000).toFixed(1)} s` : "Thinking…";
    }
    if (content !== drawn) { drawn = content; render(text, content); }  // else a selection would be lost for nothing
    numbers();
    if (follow) down();
  };
  try {
    const answer = await fetch("v1/chat/completions", { method: "POST", headers: headers(), body: JSON.stringify(body()), signal: control.signal });
    if (!answer.ok) {
      const said = await answer.json().catch(() => ({}));
      problem = said.error?.message || said.reason || `the server answered with HTTP ${answer.status}`;
      code = answer.status === 401 ? "key" : said.error?.code;
    } else for await (const event of events(answer)) {
      if (event.error) { problem = event.error.message || String(event.error); break; }
      const choice = event.choices?.[0];
      if (choice?.delta?.reasoning_content || choice?.delta?.content) {
        if (!first) first = performance.now();
        if (choice.delta.content) thoughtOut ||= performance.now();
        thinking += choice.delta.reasoning_content ?? ""; content += choice.delta.content ?? ""; pieces += 1;
        if (!drawing) { drawing = true; requestAnimationFrame(draw); }
      }
      if (choice?.finish_reason) { reason = choice.finish_reason; }
      if (event.usage) tokens = event.usage.completion_tokens;
    }
  } catch (error) {
    if (error.name === "AbortError") reason = "stopped";
    else problem = `the connection broke: ${error.message}`;
  }
  if (running !== control) return;  // a new conversation has begun
  const follow = near();
  thoughtOut ||= performance.now(); draw(); box.classList.remove("live");
  if (content || (thinking && reason !== "stopped")) messages.push({ role: "assistant", content, thinking, node: box });
  else box.remove();
  if (reason === "length") speed.textContent += " · cut at the longest answer";
  if (reason === "stopped") { speed.textContent += " · stopped"; if (!content) { takeBack(); if (!messages.length) hello(); } }
  if (content) addTools(foot, box, content);
  // Whoever reads further up, or is in another field by now, stays there.
  if (follow) down();
  if (problem) await explain(problem, code, control);
  else if (!content && !thinking && reason !== "stopped") fault("The model has answered with nothing.", "Try again", reply);
  if (running !== control) return;
  running = null; busy(false);
}
async function explain(problem, code, control) {
  const again = messages.at(-1)?.role === "user" ? reply : null;
  if (code === "context_length_exceeded") {
    try { return await tooLong(control); } catch { /* then it is said as the server said it */ }
  }
  fault(problem[0].toUpperCase() + problem.slice(1), "Try again", again);
  if (code === "key") { $("settings").showModal(); $("set-key").focus(); }
  check();
}
function takeBack() {
  const mine = messages.pop(); mine.node.remove();
  $("input").value = mine.content; grow();
}
async function copied(content) {
  // Browsers have no clipboard for pages that come over plain HTTP from another machine; the old way works there.
  try { await navigator.clipboard.writeText(content); return true; } catch { /* the old way */ }
  const focused = document.activeElement, area = make("textarea", "sr");
  area.value = content; area.readOnly = true; document.body.append(area); area.select();
  const done = document.execCommand("copy");
  area.remove(); focused?.focus({ preventScroll: true });
  return done;
}
function addTools(foot, box, content) {
  const copy = make("button", "", "Copy"), again = make("button", "", "Again");
  copy.onclick = async () => {
    copy.textContent = await copied(content) ? "Copied" : "Cannot copy";
    setTimeout(() => { copy.textContent = "Copy"; }, 1200);
  };
  again.onclick = () => {
    if (running || messages.at(-1)?.node !== box) return;
    messages.pop(); box.remove(); reply();
  };
  document.querySelectorAll(".again").forEach((other) => other.remove());
  again.className = "again"; foot.prepend(copy, again);
}
function busy(is) {
  document.body.classList.toggle("busy", is);
  $("go-name").textContent = is ? "Stop" : "Send";
  ready();
}
function ready() {
  $("go").disabled = !running && !(isThere() && $("input").value.trim());
  $("go").title = running ? "Stop (Esc)" : isThere() || state === "connecting" ? "Send (Enter)" : "The server is not ready";
}
function grow() { const input = $("input"); input.style.height = "auto"; input.style.height = input.scrollHeight + "px"; ready(); }
function restart() { const was = running; running = null; was?.abort(); messages = []; hello(); busy(false); $("input").focus(); }

$("input").addEventListener("input", grow);
$("input").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); if (!running) send($("input").value); }
});
$("form").addEventListener("submit", (event) => { event.preventDefault(); if (running) running.abort(); else send($("input").value); });
addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running && !$("settings").open) running.abort();
  if (event.altKey && event.code === "KeyN") { event.preventDefault(); restart(); }
  if (event.altKey && event.code === "KeyS") { event.preventDefault(); $("settings").showModal(); }
});
$("new").onclick = restart;

drawFields(); hello(); busy(false); check();
