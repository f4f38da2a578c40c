// The picture of exponents: what share of the chosen tensor's elements, or of all, each binade has over the measured steps.

const signed = (n) => String(n).replace("-", "−");
// Returns the cells of a picture, a byte each, in the order tensor, column, row.
function cellsOfExponents(run, { id }) {
  const key = `${run} ${id}`;
  if (!decoded.has(key)) decoded.set(key, inflate(run, id));
  return decoded.get(key);
}
// Whether a limit of a format is near enough to the values to be drawn.
const NEAR = 8;
function limitsOf({ low, rows }) {
  const high = low + rows - 2, all = [];
  for (const { name, low: least, high: most } of page.exponents.limits) all.push([name, least, "smallest"], [name, most, "largest"]);
  const inside = all.filter(([, at]) => at >= low - NEAR && at <= high + NEAR);
  const range = [Math.min(low, ...inside.map(([, at]) => at)) - 1, Math.max(high, ...inside.map(([, at]) => at)) + 1];
  return { range, inside, outside: all.filter((one) => !inside.includes(one)) };
}
let pictures = 0;
async function drawExponents() {
  const mine = ++pictures, { run, kind } = state, entry = page.exponents.pictures?.find((one) => one.of === kind);
  $("exponents-card").hidden = !entry;
  if (!entry) return;
  const cells = await cellsOfExponents(run, entry);
  if (mine !== pictures || !$("overview").clientWidth) return; // a newer call is drawing it
  const { rows, low, first, last } = entry, own = entry.each && state.tensor !== null;
  const tensor = own ? state.tensor : entry.each ? names.length : 0;
  const codes = cells.subarray(tensor * first.length * rows, (tensor + 1) * first.length * rows);
  $("exponents-title").textContent = own ? `Exponents of ${label(kind, tensor)}` : `Exponents of all ${entry.noun}s`;
  const { range, inside, outside } = limitsOf(entry);
  $("exponents").replaceChildren(picture(entry, codes, range, inside), strips([]));
  $("exponents").dataset.range = xRange().join(" ");
  const of = (word) => outside.filter(([, , what]) => what === word).map(([name, at]) => `${name} ${signed(Math.round(at))}`).join(", ");
  const far = [["smallest", "smallest subnormal"], ["largest", "largest"]].filter(([word]) => of(word)).map(([word, text]) => `${text} number of ${of(word)}`);
  $("exponents-note").textContent = `Each row has the elements of one binade, 2ⁿ ≤ |x| < 2ⁿ⁺¹. Lines are the smallest subnormal and the largest number of each format: ` +
    `elements below half of the first become 0 in a cast, and elements above the second overflow. ` + (far.length ? `Outside of the picture, as log2: ${far.join("; ")}. ` : "") +
    (entry.binned > 1 ? `Each column covers ${whole(entry.binned)} measured steps. ` : "Each column is a measured step. ") +
    (own ? "" : entry.each ? "Choose a tensor in the map to see its own." : "There are too many tensors to draw each.");
  drawShares();
  document.documentElement.dataset.exponents = own ? label(kind, tensor) : "all";
}
function drawShares() {
  const scale = element("span", { class: "scale", "aria-hidden": "true" }, element("i")), { decades } = page.exponents;
  scale.firstChild.style.background = `linear-gradient(to right, ${VIRIDIS.join(",")})`;
  for (const part of [0, 0.25, 0.5, 0.75, 1]) {
    const at = 100 * 10 ** (decades * (part - 1));
    scale.append(element("span", {}, `${part === 0 ? "≤ " : ""}${Number(at.toPrecision(1))} %`));
  }
  $("exponents-legend").replaceChildren(element("span", {}, "share of the elements"), scale,
    element("span", {}, element("i", { class: "swatch blank" }), "none"));
}
// An SVG with an image of the cells, the limits of the formats, and what is at the pointer.
function picture(entry, codes, [y0, y1], limits) {
  const { rows, low, first, last } = entry, top = 20, strip = 13, gap = 5, room = 260;
  const columnsOf = Array.from(first, (_, c) => codes.subarray(c * rows, (c + 1) * rows));
  const isBroken = columnsOf.some((column) => column[rows - 1]), above = isBroken ? strip + gap : 0;
  const plot = above + room + gap + strip, right = frame.left + frame.width, height = top + plot + 6;
  const at = (y) => above + room * (1 - (y - y0) / (y1 - y0));
  const made = svg("svg", { class: "chart", width: right + frame.right, height, role: "img", "aria-label": $("exponents-title").textContent });
  const axis = svg("g", { class: "axis" }), area = svg("svg", { x: frame.left, y: top, width: frame.width, height: plot });
  const word = (text, y) => axis.append(svg("text", { x: frame.left - 8, y: top + y, "text-anchor": "end", "dominant-baseline": "central" }, text));
  for (const y of ticks(y0, y1, 8)) if (above + room - at(y) > 8) word(signed(y), at(y)); // there is a word below
  word("exactly 0", plot - strip / 2);
  if (isBroken) word("NaN or Inf", strip / 2);
  area.append(svg("image", { href: imageOf(entry, columnsOf, plot, at, { strip, isBroken }), width: frame.width, height: plot, preserveAspectRatio: "none", class: "cells" }));
  // lines that lie closer than their labels share one
  const labels = [];
  for (const [name, y, what] of limits.toSorted((a, b) => a[1] - b[1])) {
    for (const kind of ["halo", "limit"]) area.append(svg("line", { class: kind, x1: 0, x2: frame.width, y1: at(y), y2: at(y) }));
    const before = labels.at(-1);
    if (before && before.y - at(y) < 13) {
      if (!before.words[what]) before.words[what] = [];
      before.words[what].push(name);
    } else labels.push({ y: at(y), words: { [what]: [name] } });
  }
  for (const { y, words } of labels) {
    const text = Object.entries(words).map(([what, all]) => `${what} ${all.join(", ")}`).join("; ");
    const place = { x: frame.width - 5, y: y < above + 16 ? y + 12 : y - 4, "text-anchor": "end" };
    area.append(...["halo", "limit"].map((kind) => svg("text", { class: kind, ...place }, text)));
  }
  const readout = svg("text", { class: "readout", x: right, y: 13, "text-anchor": "end" });
  const cross = svg("line", { class: "cross", y1: 0, y2: plot, x1: -9, x2: -9 });
  area.append(cross);
  made.append(axis, area, svg("text", { class: "title", x: frame.left, y: 13 }, "log2 |x|"), readout);
  const edges = edgesOf(entry);
  let pointed = null;
  made.addEventListener("pointermove", (event) => { pointed = event.clientY - made.getBoundingClientRect().top - top; });
  made.show = (step) => {
    for (const end of ["x1", "x2"]) cross.setAttribute(end, step === null ? -9 : inner(step));
    const c = step === null ? -1 : first.findIndex((_, k) => edges.left[k] <= step && step < edges.right[k]);
    readout.textContent = c < 0 || pointed === null ? "" : `${steps(first[c], last[c])}: ${shareAt(pointed, columnsOf[c])}`;
  };
  const percentOf = (code) => (code ? `${code === 1 ? "≤ " : ""}${Number((100 * 10 ** (page.exponents.decades * ((code - 1) / 254 - 1))).toPrecision(2))} %` : "none");
  const shareAt = (y, column) => {
    if (y > plot - strip - gap / 2) return `exactly 0, ${percentOf(column[0])}`;
    if (isBroken && y < strip + gap / 2) return `NaN or Inf, ${percentOf(column[rows - 1])}`;
    const n = Math.floor(y0 + (y1 - y0) * (1 - (y - above) / room)), row = n - low + 1;
    return `${signed(n)} to ${signed(n + 1)}, ${row < 1 || row > rows - 2 ? "none" : percentOf(column[row])}`;
  };
  return made;
}
// Returns the cells as an image, at the steps and exponents in view.
function imageOf(entry, columnsOf, plot, at, { strip, isBroken }) {
  const { ratio } = frame, image = document.createElement("canvas"), context = image.getContext("2d");
  image.width = Math.round(frame.width * ratio);
  image.height = Math.round(plot * ratio);
  context.scale(image.width / frame.width, ratio);
  const edges = edgesOf(entry), [x0, x1] = xRange(), stops = VIRIDIS.map(parts), inks = [colour("blank")];
  for (let code = 1; code < 256; code++) {
    const place = ((code - 1) / 254) * (stops.length - 1), k = Math.min(Math.floor(place), stops.length - 2);
    inks.push(`rgb(${stops[k].map((from, i) => Math.round(from + (place - k) * (stops[k + 1][i] - from))).join(" ")})`);
  }
  columnsOf.forEach((column, c) => {
    if (edges.right[c] <= x0 || edges.left[c] >= x1 || !column.some((code) => code)) return; // not measured
    const left = Math.floor(inner(edges.left[c]) * ratio) / ratio, width = Math.ceil(inner(edges.right[c]) * ratio) / ratio - left;
    const fill = (code, y, height) => {
      context.fillStyle = inks[code];
      context.fillRect(left, y, width, height);
    };
    fill(0, 0, plot);
    for (let row = 1; row < entry.rows - 1; row++) {
      const bottom = Math.round(at(entry.low + row - 1) * ratio) / ratio, ceiling = Math.round(at(entry.low + row) * ratio) / ratio;
      fill(column[row], ceiling, bottom - ceiling);
    }
    // the strips of zeros and of what is not finite
    fill(column[0], plot - strip, strip);
    if (isBroken) {
      fill(0, 0, strip);
      context.fillStyle = colour("broken");
      if (column.at(-1)) context.fillRect(left, 0, width, strip);
    }
  });
  context.fillStyle = colour("surface");
  context.fillRect(0, plot - strip - 5, frame.width, 5);
  if (isBroken) context.fillRect(0, strip, frame.width, 5);
  return image.toDataURL();
}
