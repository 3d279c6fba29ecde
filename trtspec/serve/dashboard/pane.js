// One run of a prompt with one K: its text as it is streamed, and its figures.

import { Aligner, events, problemOf } from "./stream.js";

/** The failure of a request. status: that of HTTP, 0 if there was none. */
export class RunError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

export class Pane {
  text = "";
  speed = 0; // tokens/s, without the first step's tokens
  #tokens = 0;
  #steps = 0; // steps after the prefill
  #drafts = 0; // steps after the prefill that had drafts
  #kept = 0; // draft tokens accepted in these steps
  #started = 0;
  #first = 0; // time of the first tokens, 0 = not yet
  #firstTokens = 0;
  #offered = []; // number of drafts by position
  #accepted = [];
  #aligner = new Aligner();

  constructor(k, template, barTemplate) {
    this.k = k;
    this.element = template.content.firstElementChild.cloneNode(true);
    this.barTemplate = barTemplate;
    this.output = this.element.querySelector(".output");
    this.bars = this.element.querySelector(".bars");
    this.title = k === 0 ? "K = 0, plain decoding" : `K = ${k}`;
    this.element.querySelector(".title").textContent = this.title;
    this.output.setAttribute("aria-label", `Output, K = ${k}`);
    if (k === 0) this.element.querySelector(".acceptance").hidden = true;
  }

  /** Run until the text is complete. Throw a RunError if it fails, an AbortError if the signal ends it. */
  async run(path, body, key, signal) {
    this.#started = performance.now();
    this.progress("running");
    try {
      const response = await this.#ask(path, { ...body, num_speculative_tokens: this.k }, key, signal);
      if (!response.ok) throw new RunError(await problemOf(response), response.status);
      for await (const event of events(response)) this.#take(event);
      this.#append(this.#aligner.finish());
    } catch (error) {
      this.progress(signal.aborted ? "stopped" : "failed");
      throw error;
    }
  }

  progress(words) {
    this.element.querySelector(".progress").textContent = words;
    this.element.dataset.state = words.split(":")[0];
  }

  async #ask(path, body, key, signal) {
    const headers = { "Content-Type": "application/json" };
    if (key) headers.Authorization = `Bearer ${key}`;
    try {
      return await fetch(path, { method: "POST", headers, body: JSON.stringify(body), signal });
    } catch (error) {
      if (signal.aborted) throw error;
      throw new RunError("The server cannot be reached. Is it still running?");
    }
  }

  #take(event) {
    if (event.error) throw new RunError(event.error.message);
    const [choice] = event.choices;
    if (choice?.speculation) {
      const text = choice.text ?? choice.delta.content ?? "";
      this.text += text;
      this.#count(choice.speculation);
      this.#append(this.#aligner.push(text, choice.speculation));
    }
    if (choice?.finish_reason) this.progress(`done: ${choice.finish_reason}`);
    if (event.usage) {
      const { steps, num_drafts, accepted_tokens } = event.usage.speculation;
      [this.#steps, this.#drafts, this.#kept] = [steps, num_drafts, accepted_tokens];
    }
    this.#show();
  }

  #count({ accepted, bonus, rejected, draft_len: drafted, parents }) {
    const now = performance.now();
    const count = accepted.length + bonus.length;
    this.#tokens += count;
    if (count === 0) return;
    if (this.#first === 0) {
      this.#first = now; // the prefill step
      this.#firstTokens = count;
      return;
    }
    this.#steps += 1;
    this.#drafts += drafted > 0 ? 1 : 0;
    this.#kept += accepted.length;
    this.speed = (1000 * (this.#tokens - this.#firstTokens)) / Math.max(now - this.#first, 1);
    const ahead = parents ? depthOf(parents) : drafted; // a position of a tree is a depth
    for (let i = 0; i < ahead && accepted.length + rejected.length > 0; i++) {
      this.#offered[i] = (this.#offered[i] ?? 0) + 1;
      this.#accepted[i] = (this.#accepted[i] ?? 0) + (i < accepted.length ? 1 : 0);
    }
  }

  #append(pieces) {
    const atEnd = this.output.scrollHeight - this.output.scrollTop - this.output.clientHeight < 30;
    for (const { kind, word, branches } of pieces) {
      const token = document.createElement(kind === "rejected" ? "del" : "span");
      token.className = `token ${kind}`;
      if (branches) token.append(...branches.map(branchOf));
      else token.textContent = kind === "rejected" ? visible(word) : word;
      this.output.append(token);
    }
    if (atEnd) this.output.scrollTop = this.output.scrollHeight;
  }

  #show() {
    const figures = {
      speed: this.speed ? this.speed.toFixed(0) : "–",
      first: this.#first ? `${(this.#first - this.#started).toFixed(0)} ms` : "–",
      length: this.#drafts ? (1 + this.#kept / this.#drafts).toFixed(2) : "–",
      "per-step": this.#steps ? (1 + this.#kept / this.#steps).toFixed(2) : "–",
      tokens: this.#tokens,
      steps: this.#steps,
    };
    for (const [name, value] of Object.entries(figures)) {
      this.element.querySelector(`[data-figure="${name}"]`).textContent = value;
    }
    this.#offered.forEach((offered, i) => this.#bar(i, this.#accepted[i], offered));
  }

  #bar(i, accepted, offered) {
    if (!this.bars.children[i]) {
      const bar = this.barTemplate.content.firstElementChild.cloneNode(true);
      bar.querySelector(".position").textContent = i + 1;
      this.bars.append(bar);
    }
    const percent = `${((100 * accepted) / offered).toFixed(0)}%`;
    this.bars.children[i].querySelector(".fill").style.width = percent;
    this.bars.children[i].querySelector(".share").textContent = `${percent} (${accepted}/${offered})`;
  }
}

/** How many tokens ahead the drafts of a tree are at most. Parents come first. */
function depthOf(parents) {
  const depths = [];
  for (const parent of parents) depths.push(parent < 0 ? 1 : depths[parent] + 1);
  return Math.max(0, ...depths);
}

/** A branch of a tree, as a line of its own. */
function branchOf(words) {
  const line = document.createElement("span");
  line.className = "branch";
  line.textContent = words.map(visible).join("");
  return line;
}

/** Show line breaks and indentation of a rejected draft by signs, so that they take no room. */
function visible(word) {
  return word.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(/ {2,}|^ $/g, "␣");
}
