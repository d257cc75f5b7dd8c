// A Llama in plain JavaScript: text to tokens, tokens to logits. It runs unit by unit, so a pruned model is the same
// loop without the units that are gone. data/make/page_model.py packs a model for it; tests/widgets/test_page_model.py
// holds it to torch.

/** y [T, m] += x [T, n] w [n, m], for n in eights: eight rows of w at a time pass over y. */
function multiply(x, w, n, m, y = new Float32Array(x.length / n * m)) {
  for (let i = 0; i < n; i += 8) {
    for (let at = i, o = 0; at < x.length; at += n, o += m) {
      const [a, b, c, d, e, f, g, h] = x.subarray(at, at + 8);
      for (let j = o, q = i * m; j < o + m; j++, q++) {
        y[j] += a * w[q] + b * w[q + m] + c * w[q + 2 * m] + d * w[q + 3 * m]
          + e * w[q + 4 * m] + f * w[q + 5 * m] + g * w[q + 6 * m] + h * w[q + 7 * m];
      }
    }
  }
  return y;
}

function dot(x, y) {
  let sum = 0;
  for (let i = 0; i < x.length; i++) sum += x[i] * y[i];
  return sum;
}

/** The softmax of logits. */
function sharesOf(logits) {
  const most = Math.max(...logits);
  const shares = new Float64Array(logits).map((x) => Math.exp(x - most));
  const sum = shares.reduce((x, y) => x + y);
  return shares.map((x) => x / sum);
}

/**
 * A byte-level BPE tokenizer. tokens: by id, a character for each byte; merges: pairs of ids, which make the last tokens,
 * in turn; splits: patterns that cut a text into words, one after the other, token 0 first.
 */
export function tokenizerOf({ tokens, merges, splits }) {
  const made = new Map(merges.map((pair, k) => [String(pair), tokens.length - merges.length + k]));
  function idsOf(word) {
    if (word === tokens[0]) return [0]; // it ends a text
    const ids = Array.from(new TextEncoder().encode(word), (byte) => tokens.indexOf(String.fromCharCode(byte)));
    for (;;) {
      const found = ids.map((id, k) => made.get(`${id},${ids[k + 1]}`) ?? Infinity);
      const first = Math.min(...found);
      if (first === Infinity) return ids;
      ids.splice(found.indexOf(first), 2, first);
    }
  }
  return {
    encode: (text) => splits.reduce((parts, split) => parts.flatMap((part) =>
      (part === tokens[0] ? [part] : part.split(new RegExp(split, "u")))), [text]).filter(Boolean).flatMap(idsOf),
    decode: (ids) => new TextDecoder().decode(Uint8Array.from(ids.map((id) => tokens[id]).join(""), (c) => c.charCodeAt(0))),
  };
}

/**
 * The model: run(ids, state), the logits [T, vocabulary] behind the tokens that come next in a text. The state of a text
 * is {gone: the units that are, kept: the keys and values of the others}.
 */
export function modelOf({ width, head, theta, epsilon, tokens, embedding, blocks, ending }) {
  function normed(x, gain) {
    const y = x.slice();
    for (let at = 0; at < x.length; at += width) {
      const row = y.subarray(at, at + width);
      const size = Math.sqrt(dot(row, row) / width + epsilon);
      for (let i = 0; i < width; i++) row[i] *= gain[i] / size;
    }
    return y;
  }
  /** Of gate and up of each token: silu(gate) up. */
  function channels(y, { columns }) {
    return new Float32Array(y.length / 2).map((_, k) => {
      const i = k + columns * Math.floor(k / columns);
      return y[i] / (1 + Math.exp(-y[i])) * y[i + columns];
    });
  }
  /** Of queries, key and value of each token: what the heads read. */
  function heads(y, { u, columns }, kept) {
    const [past, found] = [kept[u] ??= [], []];
    for (let at = 0; at < y.length; at += columns + 2 * head) {
      for (let i = at; i < at + columns + head; i += 2) { // queries and key turn by their place in the text
        const angle = past.length * theta ** (-((i - at) % head) / head);
        const [a, b, cos, sin] = [y[i], y[i + 1], Math.cos(angle), Math.sin(angle)];
        [y[i], y[i + 1]] = [a * cos - b * sin, b * cos + a * sin];
      }
      past.push(y.subarray(at + columns, at + columns + 2 * head));
      for (let q = at; q < at + columns; q += head) {
        const shares = sharesOf(past.map((key) => dot(y.subarray(q, q + head), key) / Math.sqrt(head)));
        for (let i = head; i < 2 * head; i++) found.push(past.reduce((sum, one, s) => sum + shares[s] * one[i], 0));
      }
    }
    return Float32Array.from(found);
  }
  return (ids, { gone, kept }) => {
    const x = Float32Array.from(ids.flatMap((id) => [...ending.keys()].map((i) => embedding[i * tokens.length + id])));
    for (const { ffn, gain, units } of blocks) {
      const input = normed(x, gain);
      for (const unit of units) {
        if (gone.has(unit.u)) continue;
        const y = multiply(input, unit.into, width, unit.into.length / width);
        multiply(ffn ? channels(y, unit) : heads(y, unit, kept), unit.out, unit.columns, width, x);
      }
    }
    return multiply(normed(x, ending), embedding, width, tokens.length);
  };
}

const LONG = 40; // tokens that go on

/** What text holds of a model: values, and float16 weights in base64. */
export const unpacked = (text) => JSON.parse(text, (_, value) => (value?.$half === undefined ? value
  : Float32Array.from(new Float16Array(Uint8Array.fromBase64(value.$half).buffer))));

/** What the page asks of a model. */
export function serve(text) {
  const spec = unpacked(text);
  const { rows, tokens, context } = spec;
  const [run, { encode, decode }, whole] = [modelOf(spec), tokenizerOf(spec), []];
  const begin = (order) => ({ gone: new Set(order), kept: {} });
  const scored = (k, order) => run(rows[k].slice(0, -1), begin(order));
  let sides = []; // the whole model and the pruned one behind a text
  function read(prompt, order, k) {
    const state = begin(order);
    const shares = sharesOf(run(encode(prompt).slice(LONG - context), state).slice(-tokens.length));
    const best = [...shares.keys()].sort((x, y) => shares[y] - shares[x]).slice(0, 5);
    return { prompt, state, next: best[0],
      words: best.map((id) => ({ token: decode([id]), shares: k ? [null, shares[id]] : [shares[id], null] })) };
  }
  function goOn({ state, next }) {
    const ids = [];
    while (next && ids.length < LONG) { // token 0 ends a text
      ids.push(next);
      const logits = run([next], state);
      next = logits.indexOf(Math.max(...logits));
    }
    return decode(ids);
  }
  return { rows,
    /** The likeliest next words of a text, [{token, shares}] of the whole model and of that without the units of `order`. */
    words(prompt, order) {
      sides = [sides[0]?.prompt === prompt ? sides[0] : read(prompt, [], 0), read(prompt, order, 1)];
      return sides.flatMap(({ words }) => words);
    },
    /** How the text of `words` goes on, greedily, for both. */
    texts: () => sides.map((side) => side.text ??= goOn(side)),
    /** KL(whole || pruned) of stored row k, the mean over its positions, in nats. */
    row(k, order) {
      const [p, q] = [whole[k] ??= scored(k, []), scored(k, order)];
      let kl = 0;
      for (let at = 0; at < p.length; at += tokens.length) {
        const [one, other] = [p, q].map((logits) => sharesOf(logits.subarray(at, at + tokens.length)));
        one.forEach((share, i) => { kl += share * Math.log(share / other[i]); });
      }
      return kl * tokens.length / p.length;
    },
  };
}
