// The map: the cells, which drawCells in cells.js has drawn, and over them names, steps, outlines and marks; the
// legend; pointer and key events.

const toX = (step) => frame.left + ((step - xRange()[0]) / (xRange()[1] - xRange()[0])) * frame.width;
const toY = (i) => frame.top + ((i - yRange()[0]) / (yRange()[1] - yRange()[0])) * frame.height;

// The layer over the cells: names, steps, outlines and marks of findings.
function paint() {
  const context = canvas.getContext("2d");
  const { left, top, width, height, ratio } = frame, bottom = top + height, right = left + width;
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, canvas.width, canvas.height);
  if (!state.matrix || !C || !state.rows.length) return;
  context.drawImage(base, left, top, width, height);
  context.font = labelFont();
  context.textBaseline = "middle";
  context.textAlign = "right";
  const labels = rowLabels(), texts = shortLabels(context, labels.map(([text]) => text), left - 11);
  for (const [k, [, at, line]] of labels.entries()) {
    context.fillStyle = colour("soft");
    context.fillText(texts[k], left - 8, at);
    if (line !== null) context.fillRect(left - 5, line, 5, 1);
  }
  context.textAlign = "center";
  for (const step of ticks(...xRange(), Math.max(2, Math.floor(width / 64)))) {
    context.fillRect(toX(step), bottom, 1, 4);
    context.fillText(whole(step), Math.min(toX(step), right), bottom + 15);
  }
  context.save();
  context.beginPath();
  context.rect(0, top, right + frame.right, height);
  context.clip();
  for (const finding of drawOrder(page.findings.slice(0, 2000)).map((k) => page.findings[k])) {
    const i = finding.tensor === null || finding.kind !== state.kind ? undefined : state.rowOf.get(finding.tensor);
    if (i === undefined) continue;
    context.fillStyle = colour(finding.severity);
    context.fillText(SEVERITIES[finding.severity].mark, right + frame.right / 2, (toY(i) + toY(i + 1)) / 2);
  }
  const selected = state.rowOf.get(state.tensor);
  if (selected !== undefined) outline(context, left, toY(selected), width, toY(selected + 1) - toY(selected));
  const cell = state.hover ?? state.cell;
  if (cell) {
    const x = toX(edges.left[cell.c]);
    outline(context, x, toY(cell.i), toX(edges.right[cell.c]) - x, toY(cell.i + 1) - toY(cell.i));
  }
  if (state.drag?.moved) {
    const { x, y, x1, y1 } = state.drag;
    context.fillStyle = "#8888";
    context.fillRect(Math.min(x, x1), Math.min(y, y1), Math.abs(x1 - x), Math.abs(y1 - y));
  }
  context.restore();
}
function outline(context, x, y, w, h) {
  const grow = Math.max(0, 5 - h) / 2; // a thin row stays visible
  for (const [style, line] of [["#000", 3], ["#fff", 1.5]]) {
    context.strokeStyle = style;
    context.lineWidth = line;
    context.strokeRect(x, y - grow, Math.max(w, 2), h + 2 * grow);
  }
}
let labelled = { key: "", texts: [] }; // the pointer paints often
function shortLabels(context, rows, room) {
  const key = `${room} ${rows.join("\n")}`;
  if (labelled.key !== key) {
    const marks = rows.map((row) => (row.startsWith("▸ ") ? "▸ " : ""));
    const texts = shortened(rows.map((row, k) => row.slice(marks[k].length)), (text, k) => context.measureText(marks[k] + text).width <= room);
    labelled = { key, texts: texts.map((text, k) => marks[k] + text) };
  }
  return labelled.texts;
}
// All names if there is room, otherwise the modules of the finest level that fits.
function rowLabels() {
  const [y0, y1] = yRange(), rows = state.rows.slice(y0, y1), high = frame.height / rows.length;
  if (high >= 12) return rows.map(({ name, isFolded }, i) => [(isFolded ? "▸ " : "") + name, toY(y0 + i + 0.5), null]);
  let found = [];
  for (let depth = 1; depth <= 12; depth++) {
    const groups = [];
    rows.forEach((row, i) => {
      const name = row.name.split(".", depth).join(".");
      if (groups.at(-1)?.name !== name) groups.push({ name, first: i, size: 0 });
      groups.at(-1).size++;
    });
    const fits = groups.length * 13 <= frame.height;
    if (fits || found.length < 4) found = groups; // too many: only those with room are named
    if (!fits) break;
  }
  let taken = -Infinity;
  const labels = [];
  for (const { name, first, size } of found) {
    const at = toY(y0 + first + size / 2);
    if (at - taken < 12) continue;
    labels.push([name, at, toY(y0 + first)]);
    taken = at;
  }
  return labels;
}
function ticks(low, high, most, least = 1) {
  const raw = Math.max((high - low) / most, least), power = 10 ** Math.floor(Math.log10(raw));
  const each = [1, 2, 5, 10].map((k) => k * power).find((k) => k >= raw);
  const found = [];
  for (let step = Math.ceil(low / each) * each; step <= high; step += each) found.push(step + 0);
  return found;
}

function drawLegend() {
  const m = state.matrix, isAway = m && isRelative();
  choices("scales", [["relative", "relative to usual"], ["absolute", "absolute"]], isAway ? "relative" : "absolute",
    (scale) => set({ scale }), m?.linear ? ["relative"] : []);
  choices("levels", state.levels.length > 1 ? state.levels.map(([level, count]) => [level, level === Infinity ? `all ${whole(count)}` : whole(count)]) : [],
    state.toggled.size ? null : state.folds, (level) => set({ level, toggled: new Set(), y: null, hover: null, cell: null, scope: "run" }));
  $("levels").prepend(...(state.levels.length > 1 ? [element("span", { class: "before" }, "rows")] : []));
  $("legend").hidden = $("map-note").hidden = !m;
  if (!m) return;
  const [low, high] = isAway ? [-relative(m).span, relative(m).span] : span(m);
  const scale = element("span", { class: "scale", "aria-hidden": "true" }, element("i"));
  scale.firstChild.style.background = `linear-gradient(to right, ${(isAway ? awayInks() : VIRIDIS).join(",")})`;
  for (const part of [0, 0.25, 0.5, 0.75, 1]) {
    const at = low + part * (high - low), value = number(Number((10 ** Math.abs(at)).toPrecision(2)));
    const sign = m.linear ? "" : part === 0 ? "≤ " : part === 1 ? "≥ " : "";
    scale.append(element("span", {}, isAway ? (at === 0 ? "usual" : `${sign}${at < 0 ? "÷" : "×"} ${value}`)
      : sign + (isShare(state.statistic) ? `${100 * at} %` : m.linear ? number(at) : number(Number((10 ** at).toPrecision(1))))));
  }
  const swatch = (name) => element("i", { class: `swatch ${name}` });
  $("legend").replaceChildren(
    element("span", { title: statisticOf(state.statistic).meaning }, `${nameOf(state.statistic)} of ${wordOf(state.kind)}` + (isAway ? ", relative to the tensor’s usual" : "")), scale,
    ...(m.linear ? [] : [element("span", {}, swatch("zero"), "exactly 0")]),
    element("span", {}, swatch("nonfinite"), "NaN or Inf"), element("span", {}, swatch("blank"), "not measured"),
    ...Object.entries(SEVERITIES).filter(([word]) => page.findings.some((f) => f.severity === word && f.tensor !== null))
      .map(([word, { mark }]) => element("span", {}, `${mark} ${word}`)),
  );
  const rounding = 100 * (10 ** ((m.high - m.low) / (LARGEST - SMALLEST) / 2) - 1);
  const largest = m.high < m.low ? "lowest" : "largest"; // of a cosine
  const many = page.binned > 1
    ? `Each column covers ${whole(page.binned)} recorded steps and shows their ${largest} value. `
    : "Each column is a recorded step. ";
  const all = matching("").length;
  const rows = state.shown.length === all ? plural(all, "tensor") : `${whole(state.shown.length)} of ${plural(all, "tensor")}`;
  const worst = isAway ? "the value that deviates most; an exact 0 deviates more than other values" : `their ${largest} value`;
  $("map-note").textContent = `${rows}. ${many}${isAway ? "The usual value of a tensor is the median of its columns. " : ""}` +
    `Cells that share a pixel or a folded row show ${worst}. NaN and Inf count as the largest. ` +
    `Values are rounded by at most ${m.linear ? "0.001 points" : `${Number(rounding.toPrecision(1))} %`}.`;
}

function describe({ i, c }) {
  const { name, isFolded, members } = state.rows[i], tensor = memberAt({ i, c });
  const value = cellValue(state.matrix, tensor, c), usual = isRelative() ? relative(state.matrix).usual[tensor] : null;
  let what = value === null ? "not measured" : `${nameOf(state.statistic)} ${shownAs(state.statistic, value)}`;
  if (usual !== null && value > 0 && Number.isFinite(value)) {
    what += `, ${value < usual ? "÷" : "×"} ${number(Number((value < usual ? usual / value : value / usual).toPrecision(2)))} its usual`;
  }
  if (isFolded) what += `, in ${label(state.kind, tensor)}`;
  const largest = columns.first[c] !== columns.last[c] && value !== null ? (state.matrix.high < state.matrix.low ? ", the lowest" : ", the largest") : "";
  return [isFolded ? `${name}, ${plural(members.length, "tensor")}` : label(state.kind, tensor),
    `${steps(columns.first[c], columns.last[c])}${largest}: ${what}`];
}
function showTooltip(cell) {
  const tooltip = $("tooltip");
  tooltip.hidden = !cell;
  if (!cell) return;
  const [name, text] = describe(cell);
  tooltip.replaceChildren(element("b", {}, ...breakable(cut(name, 240))), text);
  const x = toX((edges.left[cell.c] + edges.right[cell.c]) / 2), room = canvas.parentElement.clientWidth;
  tooltip.style.left = `${Math.max(0, Math.min(x + 14, room - tooltip.offsetWidth))}px`;
  const below = toY(cell.i + 1) + 12;
  const above = toY(cell.i) - tooltip.offsetHeight - 8;
  tooltip.style.top = `${below + tooltip.offsetHeight > frame.height && above > 0 ? above : below}px`;
}

function cellAt(event) {
  const box = canvas.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
  const { left, top, width, height } = frame, [x0, x1] = xRange(), [y0, y1] = yRange();
  if (!state.matrix || x >= left + width || y < top || y >= top + height || !state.rows.length) return { x, y, cell: null, name: null };
  const c = columnAt(x0 + ((x - left) / width) * (x1 - x0)), i = Math.floor(y0 + ((y - top) / height) * (y1 - y0));
  if (x < left) return { x, y, cell: null, name: i };
  return { x, y, cell: c === null ? null : { i, c }, name: null };
}
function listenToMap() {
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    const { x, y, name } = cellAt(event);
    if (name !== null) return toggleRow(name);
    state.drag = { x, y, x1: x, y1: y, moved: false };
    if (event.pointerType === "mouse") canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    const { x, y, cell, name } = cellAt(event), module = name === null || state.drag ? null : moduleOf(name);
    canvas.title = name === null ? "" : state.rows[name].name + (module === null ? "" : `\nClick: ${state.rows[name].isFolded ? "unfold" : "fold"} ${module}`);
    canvas.style.cursor = module === null ? "" : "pointer";
    if (state.drag && event.pointerType === "mouse") {
      Object.assign(state.drag, { x1: x, y1: y, moved: state.drag.moved || Math.hypot(x - state.drag.x, y - state.drag.y) > 6 });
    }
    state.hover = state.drag?.moved ? null : cell;
    showTooltip(state.hover);
    paint();
  });
  canvas.addEventListener("pointerup", (event) => {
    const drag = state.drag, { cell } = cellAt(event);
    state.drag = null;
    if (drag?.moved) {
      const [x0, x1] = xRange(), [y0, y1] = yRange(), { left, top, width, height } = frame;
      const xs = [drag.x, drag.x1].map((x) => x0 + ((x - left) / width) * (x1 - x0)).sort((a, b) => a - b);
      const ys = [drag.y, drag.y1].map((y) => y0 + ((y - top) / height) * (y1 - y0)).sort((a, b) => a - b);
      zoom(Math.abs(drag.x1 - drag.x) > 8 ? xs : state.x, Math.abs(drag.y1 - drag.y) > 14 ? [Math.floor(ys[0]), Math.ceil(ys[1])] : state.y);
    } else if (drag && cell) chooseCell(cell);
  });
  for (const end of ["pointerleave", "pointercancel"]) {
    canvas.addEventListener(end, () => {
      Object.assign(state, { hover: null, drag: null });
      showTooltip(null);
      paint();
    });
  }
  canvas.addEventListener("dblclick", showAll);
  canvas.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !state.matrix || !state.rows.length) return;
    const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0], PageUp: [-10, 0], PageDown: [10, 0] };
    const [x0, x1] = xRange(), [y0, y1] = yRange();
    const at = state.cell ?? { i: y0, c: Math.min(columnAfter(x0), C - 1) };
    if (moves[event.key]) {
      const [down, right] = state.cell ? moves[event.key] : [0, 0];
      const cell = { i: Math.max(y0, Math.min(y1 - 1, at.i + down)), c: Math.max(0, Math.min(C - 1, at.c + right)) };
      state.hover = null;
      set({ cell });
      showTooltip(cell);
      say(describe(cell).join(", "));
    } else if (event.key === "f") toggleRow(at.i);
    else if (event.key === "Enter" || event.key === " ") chooseCell(at);
    else if (event.key === "+" || event.key === "=") zoom([0.25, 0.75].map((p) => p - 0.5).map((p) => (edges.left[at.c] + edges.right[at.c]) / 2 + p * (x1 - x0)), state.y);
    else if (event.key === "-") zoom([x0 - (x1 - x0) / 2, x1 + (x1 - x0) / 2], state.y);
    else if (event.key === "0" || event.key === "Escape") showAll();
    else return;
    event.preventDefault();
  });
  canvas.addEventListener("blur", () => showTooltip(null));
}
