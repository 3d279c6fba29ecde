// The form: the request, its runs, and their results. Text from the server is only ever set as text, never as HTML.

import { watch } from "./charts.js";
import { Pane } from "./pane.js";

const byId = (id) => document.getElementById(id);
const form = byId("form");
let running = null; // the AbortController of the current run
let facts = null; // facts of the engine, after the feed has sent them

// -- stored settings: the theme for good, the key until the tab is closed ---------------------------------------------

const theme = byId("theme");
theme.value = localStorage.getItem("trtspec-theme") ?? "system";
function showTheme() {
  document.documentElement.dataset.theme = theme.value;
}
theme.addEventListener("change", () => {
  localStorage.setItem("trtspec-theme", theme.value);
  showTheme();
});
showTheme();

byId("key").value = sessionStorage.getItem("trtspec-key") ?? "";
byId("key").addEventListener("input", () => sessionStorage.setItem("trtspec-key", byId("key").value));

// -- the form ---------------------------------------------------------------------------------------------------------

function showFields() {
  const compare = byId("compare").checked;
  byId("other-k-field").hidden = byId("in-turn-field").hidden = !compare;
  byId("other-k").disabled = !compare; // a hidden field must not make the form invalid
  byId("panes").classList.toggle("hide-rejected", !byId("show-rejected").checked);
}
byId("compare").addEventListener("change", showFields);
byId("show-rejected").addEventListener("change", showFields);
showFields();

function onFeed(event) {
  if (!facts && event.facts) {
    facts = event.facts;
    byId("k").max = byId("other-k").max = facts.max_draft_len;
    if (byId("k").value === "") byId("k").value = facts.max_draft_len;
    byId("model").textContent = event.name;
    const lossy = facts.lossy ? ", lossy: acceptance is forced" : "";
    byId("facts").textContent =
      `${facts.mode}, K up to ${facts.max_draft_len}${lossy}; context ${facts.max_seq_len}, batch ${facts.max_batch_size}`;
  }
  if (event.needs_key) byId("key-field").hidden = false;
}

function request() {
  const number = (id) => (byId(id).value === "" ? null : byId(id).valueAsNumber);
  const prompt = byId("prompt").value;
  const chat = byId("chat").checked;
  const body = {
    ...(chat ? { messages: [{ role: "user", content: prompt }] } : { prompt }),
    max_tokens: number("max-tokens"),
    temperature: number("temperature"),
    // one seed for all runs that are compared
    seed: number("seed") ?? Math.floor(Math.random() * 2 ** 31),
    stream: true,
    stream_options: { include_usage: true },
    return_speculation: true,
  };
  return { path: chat ? "v1/chat/completions" : "v1/completions", body };
}

// -- running ----------------------------------------------------------------------------------------------------------

async function run() {
  if (running || !form.reportValidity()) return;
  const { path, body } = request();
  const lengths = [byId("k").valueAsNumber];
  if (byId("compare").checked) lengths.push(byId("other-k").valueAsNumber);
  const panes = lengths.map((k) => new Pane(k, byId("pane-template"), byId("bar-template")));
  byId("panes").replaceChildren(...panes.map((pane) => pane.element));
  say("Running.");
  setRunning(new AbortController());
  const { signal } = running;
  const one = (pane) => pane.run(path, body, byId("key").value, signal);
  const inTurn = byId("in-turn").checked;
  try {
    if (inTurn) for (const pane of panes) await one(pane);
    else await all(panes.map(one));
    say(verdict(panes, inTurn));
  } catch (error) {
    if (signal.aborted && error.name === "AbortError") say("Stopped.");
    else explain(error);
  } finally {
    setRunning(null);
  }
}

/** Wait until all promises have ended. Throw the first error, if there is one. */
async function all(promises) {
  const failed = (await Promise.allSettled(promises)).find(({ status }) => status === "rejected");
  if (failed) throw failed.reason;
}

function verdict([first, second], inTurn) {
  if (!second) return "Done.";
  if (first.text !== second.text) {
    let i = 0;
    while (first.text[i] === second.text[i]) i++;
    return `Texts differ from character ${i + 1} on.`;
  }
  const equal = `Texts are equal (${first.text.length} characters).`;
  const [fast, slow] = first.speed >= second.speed ? [first, second] : [second, first];
  if (!inTurn || !slow.speed) return equal; // a run of one step has no speed
  return `${equal} K = ${fast.k}: ${(fast.speed / slow.speed).toFixed(2)}x the speed of K = ${slow.k}.`;
}

function say(words) {
  byId("problem").textContent = "";
  byId("status").textContent = words;
}

function explain(error) {
  say("Failed.");
  byId("problem").textContent = error.message;
  if (error.status === 401) {
    byId("key-field").hidden = false;
    byId("key").focus();
  }
}

/** Set the current run. Disabled buttons stay focusable, so that no focus is lost. */
function setRunning(controller) {
  running = controller;
  byId("run").setAttribute("aria-disabled", running !== null);
  byId("stop").setAttribute("aria-disabled", running === null);
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  run();
});
byId("stop").addEventListener("click", () => running?.abort());
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    run();
  }
});

watch(byId("charts"), byId("chart-template"), onFeed);
