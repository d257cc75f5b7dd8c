// The models of a page without a kernel: plain values that announce their changes.

/** The widget model that render() needs, over plain values; save_changes announces changes. */
export function localModel(values) {
  const handlers = {}; // a set of jobs by event
  const changed = new Set();
  return {
    get: (name) => values[name],
    set(name, value) {
      if (values[name] === value) return; // linked models would otherwise echo without end
      values[name] = value;
      changed.add(name);
    },
    save_changes() {
      const names = [...changed];
      changed.clear();
      for (const name of names) for (const job of [...handlers[`change:${name}`] ?? []]) job();
    },
    on: (event, job) => (handlers[event] ??= new Set()).add(job),
    off: (event, job) => handlers[event]?.delete(job),
    send: () => undefined,
  };
}

/** Keep traits of two models equal. */
export function link(one, other, names) {
  const copy = (from, to, name) => () => {
    to.set(name, from.get(name));
    to.save_changes();
  };
  for (const name of names) {
    one.on(`change:${name}`, copy(one, other, name));
    other.on(`change:${name}`, copy(other, one, name));
  }
}

/** For JSON.parse: {"$bytes": base64} anywhere inside becomes a DataView. */
export function revive(key, value) {
  if (value?.$bytes === undefined) return value;
  return new DataView(Uint8Array.from(atob(value.$bytes), (c) => c.charCodeAt(0)).buffer);
}
