// The engine's state from the server's feed: its status in the header, and small charts of the last minute.

const KEPT = 240; // events: a minute, at four events a second
const SHOWN = 4; // events; the figure next to a chart is their mean
const WIDTH = 240, HEIGHT = 44, MARGIN = 3; // of a chart, in units of its viewBox

const whole = (x) => x.toFixed(0);
const percent = (x) => `${(100 * x).toFixed(0)}%`;
const sum = (xs) => xs.reduce((a, b) => a + b, 0);

// value: null = nothing to show. top: top of the axis; unset = 5 % above the largest value that is shown.
// latest: show the latest value, not a mean.
const CHARTS = [
  { name: "Tokens/s", value: (e) => e.tokens_per_second, words: whole },
  { name: "Steps/s", value: (e) => e.steps_per_second, words: whole },
  {
    name: "Accepted",
    value: (e) => (sum(e.drafted) ? sum(e.accepted) / sum(e.drafted) : null),
    words: percent,
    top: () => 1,
  },
  { name: "Batch", value: (e) => e.load.running, words: whole, top: (e) => e.facts.max_batch_size, latest: true },
  { name: "Waiting", value: (e) => e.load.waiting, words: whole, latest: true },
  { name: "KV in use", value: (e) => e.load.kv_used, words: (x) => `${(100 * x).toFixed(x > 0 && x < 0.1 ? 1 : 0)}%`, latest: true },
];

class Chart {
  #values = [];

  constructor(spec, template) {
    this.spec = spec;
    this.element = template.content.firstElementChild.cloneNode(true);
    this.element.querySelector(".name").textContent = spec.name;
    this.now = this.element.querySelector(".now");
    this.peak = this.element.querySelector(".peak");
    this.path = this.element.querySelector("path");
  }

  take(event) {
    const { value, words, top, latest } = this.spec;
    this.#values.push(value(event));
    if (this.#values.length > KEPT) this.#values.shift();
    const last = this.#values.slice(latest ? -1 : -SHOWN).filter((x) => x !== null);
    this.now.textContent = last.length ? words(sum(last) / last.length) : "–";
    const peak = Math.max(...this.#values); // null counts as 0
    this.peak.textContent = `peak ${words(peak)}`;
    const high = top ? top(event) : Math.max(peak, 1e-3) * 1.05;
    this.path.setAttribute("d", this.#line(high));
  }

  /** Path of the values, the newest at the right, with a gap where a value is null. */
  #line(high) {
    const left = KEPT - this.#values.length;
    let pen = "M";
    let line = "";
    this.#values.forEach((value, i) => {
      if (value === null) {
        pen = "M";
        return;
      }
      const x = ((left + i + 1) * WIDTH) / KEPT;
      const y = HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * Math.min(value / high, 1);
      line += `${pen}${x.toFixed(1)} ${y.toFixed(1)}${pen === "M" ? "h0.1" : ""}`; // makes a lone point visible
      pen = "L";
    });
    return line;
  }
}

/** Show the feed for as long as the page is open, and call onEvent for every event. */
export function watch(container, template, onEvent) {
  const charts = CHARTS.map((spec) => new Chart(spec, template));
  container.append(...charts.map((chart) => chart.element));
  const source = new EventSource("live");
  source.onmessage = ({ data }) => {
    const event = JSON.parse(data);
    showState(event.state, event);
    if (event.facts) charts.forEach((chart) => chart.take(event));
    onEvent(event);
  };
  source.onerror = () => showState("no connection"); // the browser tries again by itself
}

function showState(state, event) {
  const element = document.getElementById("state");
  element.dataset.state = state;
  if (element.textContent !== state) element.textContent = state;
  element.title = event?.last_engine_ended ? `the last engine ended: ${event.last_engine_ended}` : "";
}
