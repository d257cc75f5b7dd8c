// The figure starts before Plotly's code is there, and loses nothing of what arrives meanwhile.

import assert from "node:assert/strict";
import test from "node:test";

import { lateFigure, MESSAGES } from "../../../widgets/cocurve_widgets/front/figure.js";

/** A model whose handlers run where a value changes, as Backbone's do. */
class Model {
  constructor() {
    this.values = Object.fromEntries(MESSAGES.map((name) => [name, null]));
    this.values._description = "A scatter";
    this.handlers = [];
  }
  get(name) { return this.values[name]; }
  set(name, value) {
    if (this.values[name] === value) return;
    this.values[name] = value;
    for (const [event, run] of [...this.handlers]) if (event === `change:${name}`) run();
  }
  on(event, run) { this.handlers.push([event, run]); }
  off(event, run) {
    this.handlers = this.handlers.filter(([e, r]) => e !== event || r !== run);
  }
  /** As Python sends a message: its content, then nothing again. */
  receive(name, message) { for (const value of [message, null]) this.set(name, value); }
}

/** A stand-in for Plotly's widget that writes down what it is told, and when it is drawn. */
function recorder(log) {
  return {
    initialize({ model }) {
      for (const name of MESSAGES) {
        model.on(`change:${name}`, () => {
          if (model.get(name) !== null) log.push([name, model.get(name)]);
        });
      }
    },
    render() { log.push("drawn"); },
  };
}

function slow() {
  let arrive, fail;
  const code = new Promise((resolve, reject) => { [arrive, fail] = [resolve, reject]; });
  return { code, arrive, fail };
}

const element = () => ({
  set: {},
  setAttribute(name, value) { this.set[name] = value; },
});

test("what arrives while the code loads is handed over once, whole and in order", async () => {
  const model = new Model(), log = [], { code, arrive } = slow(), el = element();
  const figure = lateFigure(() => code);
  assert.equal(figure.initialize({ model }), undefined); // started: nothing to wait for
  const [add, , , restyle, relayout] = MESSAGES;
  const sent = [[add, { a: 1 }], [relayout, { b: 2 }], [restyle, { c: 3 }], [relayout, { d: 4 }]];
  for (const [name, message] of sent) model.receive(name, message);
  model.set(restyle, { e: 5 }); // its end has not arrived yet
  const drawn = figure.render({ model, el });
  assert.deepEqual(log, []);
  assert.deepEqual(el.set, { role: "figure", "aria-label": "A scatter" }); // named at once
  arrive(recorder(log));
  await drawn;
  const all = [...sent, [restyle, { e: 5 }]];
  assert.deepEqual(log, [...all, "drawn"]);
  assert.ok(MESSAGES.every((name) => model.get(name) === null));
  model.set(restyle, null);
  model.receive(add, { f: 6 }); // from here on Plotly listens itself
  assert.deepEqual(log, [...all, "drawn", [add, { f: 6 }]]);
});

test("code that cannot be loaded is an error of drawing", async () => {
  const model = new Model(), { code, fail } = slow();
  const figure = lateFigure(() => code);
  figure.initialize({ model });
  const drawn = figure.render({ model, el: element() });
  fail(new Error("damaged"));
  await assert.rejects(drawn, /damaged/);
});
