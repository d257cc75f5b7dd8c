// The columns of the lambda explorer: three, two or one, by the width there is.

/**
 * Place the columns [map, curves, numbers] in a body, so that its width is used and nothing
 * overflows; `shares` and `hands` (what clicks made) go below the map or the curves. Returns their
 * widths.
 */
export function placeColumns(body, columns, shares, hands) {
  const [mapColumn, curveColumn, sideColumn] = columns;
  const wide = Math.max(280, body.clientWidth || 900);
  const gap = 24;
  let widths = [wide, wide, wide];
  if (wide >= 1080) {
    const side = Math.max(430, Math.round(0.3 * wide));
    const rest = wide - side - 2 * gap;
    widths = [Math.round(0.46 * rest), Math.round(0.54 * rest), side];
  } else if (wide >= 560) {
    widths = [Math.round(0.42 * wide), 0, 0];
    widths[1] = wide - widths[0] - gap;
    widths[2] = wide >= 760 ? widths[1] : wide;
  }
  // two columns: the numbers below the curve, or below both where that is narrow
  const under = wide >= 760 && wide < 1080;
  move(sideColumn, under ? curveColumn : body);
  move(shares, wide >= 1080 ? curveColumn : mapColumn);
  // so that nothing stands between the curve and the numbers
  if (!under) move(hands, curveColumn);
  else move(hands, mapColumn, shares);
  columns.forEach((column, k) => {
    column.style.width = `${widths[k]}px`;
  });
  return widths;
}

function move(element, home, before = null) {
  if (element.parentNode === home) return;
  // a field that is moved loses the focus and may report a change, which paints and moves as well
  if (element.contains(document.activeElement)) document.activeElement.blur();
  if (element.parentNode !== home) home.insertBefore(element, before);
}
