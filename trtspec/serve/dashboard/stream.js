// Reads the server's stream, and finds the part of the text that each token is.

/** Yield the JSON of each server-sent event until [DONE]. Throw an Error if the stream ends before that. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) throw new Error("The server closed the stream before it was complete.");
      const parts = (pending + value).split("\n\n");
      pending = parts.pop();
      for (const part of parts) {
        const data = part.replace(/^data: /, "");
        if (data === "[DONE]") return;
        yield JSON.parse(data);
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // an aborted stream cannot be cancelled again
  }
}

/** Return the error message of a failed response. */
export async function problemOf(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The server answered with status ${response.status}.`;
  }
}

/**
 * Cuts the text into its tokens. A token's own text is not always a part of the whole. Half a character has no text. A
 * tokenizer may drop the space before a word that stands alone. And text that may become a stop string comes later than
 * its tokens. So tokens wait for their text, and tokens that cannot be told apart stay in one piece.
 */
export class Aligner {
  #text = "";
  #waiting = []; // {kind, word}

  /**
   * Add text and a step's speculation, and return the pieces that they complete: [{kind, word}]. kind is one of
   * accepted, rejected, bonus, plain. A rejected part of a tree has no word, but branches: [[word]].
   */
  push(text, speculation) {
    const own = speculation.draft_len > 0 ? "bonus" : "plain";
    const add = (kind, words) => this.#waiting.push(...words.map((word) => ({ kind, word })));
    if (speculation.parents) this.#addTree(speculation);
    else {
      add("accepted", speculation.accepted);
      add("rejected", speculation.rejected); // before the token that replaced them
    }
    add(own, speculation.bonus);
    this.#text += text;
    const pieces = [];
    while (this.#waiting.length > 0) {
      const { kind, word } = this.#waiting[0];
      if (kind === "rejected") pieces.push(this.#waiting.shift());
      else if (this.#text.startsWith(word)) pieces.push(this.#take(kind, word.length));
      else if (this.#text.startsWith(` ${word}`)) pieces.push(this.#take(kind, word.length + 1));
      else if (word.startsWith(this.#text)) break; // the rest of the word has not come yet
      else pieces.push(...this.#skip());
    }
    return pieces;
  }

  /** Return the pieces that are left at the end. */
  finish() {
    const pieces = this.#waiting.filter(({ kind }) => kind === "rejected");
    if (this.#text !== "") pieces.unshift({ kind: this.#waiting[0]?.kind ?? "plain", word: this.#text });
    return pieces;
  }

  /** Before each accepted token of a tree, and after the last one, come the branches that were guessed in its place. */
  #addTree({ accepted, rejected, parents }) {
    const words = [...accepted, ...rejected];
    const isRejected = (node) => node >= accepted.length;
    const children = (node) => parents.flatMap((parent, i) => (parent === node && isRejected(i) ? [i] : []));
    const branches = (node) => {
      const after = children(node).flatMap(branches);
      return after.length > 0 ? after.map((branch) => [words[node], ...branch]) : [[words[node]]];
    };
    for (let i = -1; i < accepted.length; i++) {
      if (i >= 0) this.#waiting.push({ kind: "accepted", word: accepted[i] });
      const guessed = children(i).flatMap(branches);
      if (guessed.length > 0) this.#waiting.push({ kind: "rejected", branches: guessed });
    }
  }

  #take(kind, length) {
    const word = this.#text.slice(0, length);
    this.#text = this.#text.slice(length);
    this.#waiting.shift();
    return { kind, word };
  }

  /** Take the text up to the next token that can be found in it, as one piece. If there is none, take all text. */
  #skip() {
    const next = this.#waiting.findIndex(
      ({ kind, word }, i) => i > 0 && kind !== "rejected" && /^[^\uFFFD]+$/.test(word) && this.#text.includes(word),
    );
    const skipped = this.#waiting.splice(0, next < 0 ? this.#waiting.length : next);
    const length = next < 0 ? this.#text.length : this.#text.indexOf(this.#waiting[0].word);
    const word = this.#text.slice(0, length);
    this.#text = this.#text.slice(length);
    return [{ kind: skipped[0].kind, word }, ...skipped.filter(({ kind }) => kind === "rejected")];
  }
}
