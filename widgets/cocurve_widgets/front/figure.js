// Plotly's figure, started at once. Its code is 5 MB, and anywidget drops messages from Python to a
// widget that has not started within two seconds, which is too short for a busy browser. So this
// small module starts in its place, keeps the messages while the code loads, and hands them over.

export const MESSAGES = [
  "addTraces", "deleteTraces", "moveTraces", "restyle", "relayout", "update", "animate",
  "removeLayoutProps", "removeTraceProps",
].map((name) => `_py2js_${name}`);

/** Plotly's own widget, from the code that came with the model. */
export async function plotly(model) {
  const place = URL.createObjectURL(new Blob([model.get("_plotly")], { type: "text/javascript" }));
  try {
    return (await import(place)).default();
  } finally {
    URL.revokeObjectURL(place);
  }
}

/** A widget that stands in for the one `load` promises, with a name for screen readers. */
export function lateFigure(load) {
  let figure;
  return {
    initialize({ model }) {
      const early = [];
      const keepers = MESSAGES.map((name) => [`change:${name}`, () => {
        if (model.get(name) !== null) early.push([name, model.get(name)]);
      }]);
      for (const [event, keep] of keepers) model.on(event, keep);
      figure = load(model).then((loaded) => {
        for (const [event, keep] of keepers) model.off(event, keep);
        loaded.initialize({ model });
        for (const [name, message] of early) {
          // from nothing to the message and back, as Python sends it
          for (const value of [null, message, null]) model.set(name, value);
        }
        return loaded;
      });
    },

    async render({ model, el }) {
      el.setAttribute("role", "figure");
      el.setAttribute("aria-label", model.get("_description"));
      return (await figure).render({ model, el });
    },
  };
}
