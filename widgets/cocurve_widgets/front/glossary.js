// The words of the instruments, explained on hover and on focus. Python reads the same table.

export const TERMS = {
  "lambda": "The weight λ, from 0 to 1, of the edges in the choice of the units to remove. At 0 each unit is judged alone, at 1 pairs count in full.",
  "ratio": "The share of the parameters of all units that a plan removes.",
  "unit": "A part that can be cut out whole: an attention head (or the query heads that share one key and value head), or a block of FFN channels.",
  "saliency": "H_uu, the diagonal entry of a unit u: twice the predicted cost of removing u alone, in nats per token.",
  "edge": "H_uv, the entry of two units u and v: what removing both is predicted to cost beyond the sum of each alone. Below zero the two losses partly cancel.",
  "bridge": "A unit of low saliency and high connectivity, the sum of |H_uv| over all other units: cheap to remove alone, but tied to many others.",
  "nats": "The unit of KL with natural logarithms. 1 nat is 1.44 bits.",
  "KL": "The Kullback-Leibler divergence: how far the pruned model's predictions of the next token are from the whole model's, in nats per token. 0 is no harm.",
  "plan": "The units to remove together, found for a ratio, a lambda and the guards.",
  "guard": "A limit on plans: a largest share of each layer, layers that stay whole, or one kind of unit alone."
};

/** A word, or a text in its place, with its explanation; it can be focused. Escape hides it. */
export function term(name, text = name) {
  const word = document.createElement("span");
  word.className = "cc-term";
  word.textContent = text;
  word.tabIndex = 0;
  word.dataset.tip = TERMS[name];
  word.setAttribute("aria-description", TERMS[name]);
  word.setAttribute("data-lm-suppress-shortcuts", "true"); // as for all that takes keys, see h()
  word.addEventListener("keydown", (event) => event.key === "Escape" && word.blur());
  return word;
}
