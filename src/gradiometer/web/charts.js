// The line charts: one SVG for each scalar, above one another, with the steps of the map.

const inner = (step) => toX(step) - frame.left;
// The range of the values in view; on a log axis the range of exponents.
function yLimits(lines, log) {
  const [x0, x1] = xRange();
  let [low, high] = [Infinity, -Infinity];
  for (const { x, y } of lines) {
    x.forEach((step, k) => {
      if (step < x0 || step > x1 || y[k] === null || (log && y[k] <= 0)) return;
      const value = log ? Math.log10(y[k]) : y[k];
      [low, high] = [Math.min(low, value), Math.max(high, value)];
    });
  }
  if (low > high) return log ? [-1, 1] : [0, 1];
  const pad = Math.max((high - low) * 0.06, log ? 0.1 : Math.abs(high) * 0.02 || 0.1);
  return [low - pad, high + pad];
}
function logTicks(low, high) {
  if (high - low < 1) return ticks(10 ** low, 10 ** high, 4, 0).map((x) => Number(x.toPrecision(12)));
  const factors = high - low > 3 ? [1] : [1, 3], found = [], skip = Math.max(1, Math.ceil((high - low) / 5));
  for (let power = Math.floor(low); power <= high; power++) {
    if (power % skip === 0) found.push(...factors.map((k) => k * 10 ** power));
  }
  return found.filter((x) => x >= 10 ** low && x <= 10 ** high);
}
// Whether values that are not negative would look flat on a linear axis: most are far below the largest.
function isWild(lines, spread) {
  const kept = lines.flatMap(({ y }) => y.filter((value) => value !== null)).sort((a, b) => a - b);
  const above = kept.filter((value) => value > 0);
  return above.length > 0 && kept[0] >= 0 && above.at(-1) > spread * above[above.length >> 1];
}

// A chart of lines { x, y, ink, dash }: y is null where a value is not finite, and the line has a gap. A line with a
// label is a limit.
function chart({ title, lines, log, height, shapes = [], id, caption = "" }) {
  const top = caption ? 35 : 20, plot = height - 26, right = frame.left + frame.width;
  // a log axis has no 0: zeros are on a line of their own below it
  const hasZero = log && lines.some(({ y }) => y.includes(0)), room = hasZero ? plot - 14 : plot, zero = plot - 4;
  const [low, high] = yLimits(lines, log);
  const at = (y) => (log && y <= 0 ? zero : room * (1 - ((log ? Math.log10(y) : y) - low) / (high - low)));
  const made = svg("svg", { class: "chart", width: right + frame.right, height: plot + top + 6, role: "img", "aria-label": title, id });
  const axis = svg("g", { class: "axis" }), area = svg("svg", { x: frame.left, y: top, width: frame.width, height: plot });
  const marks = log ? logTicks(low, high) : ticks(low, high, 4, 0).map((x) => Number(x.toPrecision(12)));
  for (const y of hasZero ? [0, ...marks] : marks) {
    axis.append(svg("line", { x1: frame.left, x2: right, y1: top + at(y), y2: top + at(y), ...(hasZero && y === 0 ? { "stroke-dasharray": "2 3" } : {}) }),
      svg("text", { x: frame.left - 8, y: top + at(y), "text-anchor": "end", "dominant-baseline": "central" }, number(y)));
  }
  for (const step of stepTicks()) area.append(svg("line", { class: "grid", x1: inner(step), x2: inner(step), y1: 0, y2: plot }));
  area.append(...shapes.map(({ step, ...kind }) => svg("line", { x1: inner(step), x2: inner(step), y1: 0, y2: plot, ...kind })));
  for (const { x, y, ink, dash, label, quiet } of lines) {
    let line = "", dots = "", bad = "";
    for (let k = 0; k < x.length; k++) {
      const place = inner(x[k]).toFixed(1);
      if (y[k] === null) bad += `M${place} 4h0`;
      else {
        const before = y[k - 1] ?? null, point = `${place} ${at(y[k]).toFixed(1)}`;
        line += `${before === null ? "M" : "L"}${point}`;
        if ((x.length <= 80 && !label && !quiet) || (log && y[k] === 0) || (before === null && (y[k + 1] ?? null) === null)) dots += `M${point}h0`;
      }
    }
    area.append(svg("path", { class: label ? "line ceiling" : quiet ? "line quiet" : "line", d: line, stroke: `var(--${ink})`, ...(dash ? { "stroke-dasharray": dash } : {}) }));
    if (label) area.append(svg("text", { class: "ceiling-label", x: frame.width - 4, y: at(y.at(-1)) + (at(y.at(-1)) < 16 ? 13 : -5) }, label));
    if (dots) area.append(svg("path", { class: "dots", d: dots, stroke: `var(--${ink})` }));
    if (bad) area.append(svg("path", { class: "dots bad", d: bad, stroke: "var(--broken)" }));
  }
  const readout = svg("text", { class: "readout", x: right, y: 13, "text-anchor": "end" });
  const cross = svg("line", { class: "cross", y1: 0, y2: plot, x1: -9, x2: -9 });
  area.append(cross);
  made.append(axis, area, svg("text", { class: "title", x: frame.left, y: 13 }, cut(title, 80) + (log ? ", log scale" : "")), readout);
  if (caption) made.append(svg("text", { class: "caption", x: frame.left, y: 28 }, caption));
  // shows the values at the pointer
  made.show = (step) => {
    for (const end of ["x1", "x2"]) cross.setAttribute(end, step === null ? -9 : inner(step));
    readout.textContent = step === null ? "" : lines.filter(({ x, label, quiet }) => x.length && !label && !quiet).map(({ x, y, mark }) => {
      let [from, to] = [0, x.length - 1]; // the last point up to the step
      while (from < to) {
        const middle = (from + to + 1) >> 1;
        if (x[middle] <= step) from = middle;
        else to = middle - 1;
      }
      if (from + 1 < x.length && x[from + 1] - step < step - x[from]) from++;
      return `${mark ? `${mark}, ` : ""}step ${whole(x[from])}: ${y[from] === null ? "not finite" : number(y[from])}`;
    }).join("   ");
  };
  return made;
}
const stepTicks = () => ticks(...xRange(), Math.max(2, Math.floor(frame.width / 64)));
// Rows of marks below the charts, and the numbers of the steps.
function strips(rows) {
  const [high, total] = [17, rows.length * 17], made = svg("svg", { class: "chart", width: frame.left + frame.width + frame.right, height: total + 24 });
  const area = svg("svg", { x: frame.left - 6, width: frame.width + 12, height: total });
  rows.forEach(([word, all, ink], k) => {
    const y = k * high + high / 2;
    made.append(svg("text", { x: frame.left - 8, y, "text-anchor": "end", "dominant-baseline": "central" }, word));
    if (ink) area.append(...all.map(([a, b]) => svg("line", { class: "span", x1: 6 + inner(a), x2: 6 + inner(b), y1: y, y2: y, stroke: `var(--${ink})` })));
    else area.append(...drawOrder(all).map((i) => findingMark(all[i], i, y)));
  });
  made.append(area, ...stepTicks().map((step) => svg("text", { x: toX(step), y: total + 14, "text-anchor": "middle" }, whole(step))));
  return made;
}
function findingMark(finding, k, y) {
  const text = `${finding.severity}, ${steps(finding.first_step, finding.last_step)}: ${cut(finding.message, 300)}`;
  return svg("text", { class: "mark", x: 6 + inner(finding.first_step), y, "text-anchor": "middle", "dominant-baseline": "central",
    fill: `var(--${finding.severity})`, "data-finding": k }, SEVERITIES[finding.severity].mark, svg("title", {}, text));
}

// How the lines of each run are drawn; only two runs need a name.
const STYLES = [{ ink: "norm" }, { ink: "other", dash: "5 3" }];
const styleOf = (run) => ({ ...STYLES[run], mark: data.runs.length > 1 ? "AB"[run] : "" });
function drawOverview() {
  const lined = (lines) => lines.map((line, run) => ({ ...line, ...styleOf(run) })).filter(({ x }) => x?.length);
  const shapes = page.attempts.slice(1).map((first) => ({ step: first - 0.5, class: "attempt" }));
  if (data.differ?.step !== null && data.differ) shapes.push({ step: data.differ.step, class: "differ" });
  if (state.cell) shapes.push({ step: columns.first[state.cell.c], class: "chosen" });
  const norm = lined(data.runs.map((run) => run.norm)), drawn = [], { limit, clipped } = page;
  if (limit.x.length) norm.push({ ...limit, ink: "skipped", dash: "6 3", label: `clip_max_norm ${number(limit.y.at(-1))}` });
  const words = [...new Set(data.runs.flatMap((run) => run.scalars.map(({ name }) => name)))];
  const order = { loss: 0, lr: 1 };
  words.sort((a, b) => (order[a] ?? 2) - (order[b] ?? 2));
  const scalars = words.map((name) => [name, lined(data.runs.map((run) => run.scalars.find((one) => one.name === name) ?? {}))]).filter(([, lines]) => lines.length);
  const apart = data.differ?.distances;
  if (apart) {
    const others = apart.others.map((line) => ({ ...line, ink: "soft", quiet: true }));
    const lines = [...others, { ...apart.limit, ink: "skipped", dash: "6 3", mark: "rounding" }, { ...apart.line, ink: "norm", mark: cut(apart.name, 40) }];
    const marks = apart.step === null ? [] : [{ step: apart.step, class: "differ" }];
    drawn.push({ title: "relative distance between A and B", lines, log: true, shapes: marks, caption: `${cut(apart.name, 60)}, other gradients (grey), and what rounding explains (dashed)` });
  }
  if (norm.length || !scalars.length) drawn.push({ title: "total gradient norm", lines: norm, log: norm.some(({ y }) => y.some((value) => value > 0)),
    caption: clipped ? `clipped in ${whole(clipped[0])} of ${plural(clipped[1], "step")}` : "" });
  // a noise scale is a ratio, and is compared by factors
  for (const [title, lines] of scalars) drawn.push({ title, lines, log: isWild(lines, title.startsWith("noise_scale") ? 0 : 50) });
  // the first three are higher than the others
  const charts = drawn.map((one, k) => chart({ shapes, ...one, height: k < 3 ? 120 : 84 }));
  const rows = [["findings", page.findings], ["not finite", page.nonfinite, "broken"], ["skipped", page.skipped, "skipped"]];
  $("overview").replaceChildren(...charts, strips(rows.filter(([, all]) => all.length)));
  $("overview").dataset.range = xRange().join(" ");
  $("more-scalars").textContent = page.more_scalars ? `${plural(page.more_scalars, "more scalar is", "more scalars are")} not drawn.` : "";
}
function drawHistory() {
  const card = $("history-card"), m = state.matrix;
  card.hidden = state.tensor === null || !m;
  if (card.hidden) return;
  const row = state.tensor, name = names[row], bad = [];
  const lines = state.matrices.map((one, run) => {
    const at = one ? one.names.indexOf(name) : -1;
    if (at < 0) return null;
    const { first, last } = one.page.columns, line = { x: [], y: [], ...styleOf(run) };
    first.forEach((step, c) => {
      const value = cellValue(one, at, c);
      if (value === null) return;
      line.x.push(Math.round((step + last[c]) / 2));
      line.y.push(Number.isFinite(value) ? value * (isShare(state.statistic) ? 100 : 1) : null);
      if (run !== state.run || Number.isFinite(value)) return;
      if (c && bad.at(-1)?.[2] === c - 1) bad.at(-1).splice(1, 2, last[c], c);
      else bad.push([step, last[c], c]);
    });
    return line;
  }).filter(Boolean);
  const log = !m.linear && lines.some(({ y }) => y.some((value) => value > 0)), summary = page.summary[state.kind];
  $("history-title").replaceChildren(...breakable(label(state.kind, row)));
  const [first] = statisticsOf(state.kind);
  const from = summary.at[row] === null ? "never finite" : `largest ${nameOf(first)} ${number(summary.largest[first][row])} at step ${whole(summary.at[row])}`;
  $("history-note").textContent = `${rowsOf(state.kind).shapes[row]}, ${whole(summary.numel[row])} elements; ${from}; ` +
    (summary.broken[row] ? `NaN or Inf in ${plural(summary.broken[row], "step")}.` : "finite throughout.");
  $("history").replaceChildren(chart({ title: nameOf(state.statistic), lines, log, height: 170 }),
    strips(bad.length ? [["not finite", bad, "broken"]] : []));
  $("history").dataset.range = xRange().join(" ");
}
function drawCharts() {
  if ($("overview").clientWidth === 0) return;
  drawOverview();
  drawHistory();
  drawExponents();
  document.documentElement.dataset.charts = "drawn";
}
function listenToCharts(id) {
  const place = $(id), box = element("div", { class: "selection" });
  let from = null;
  const positionOf = (event) => event.clientX - place.getBoundingClientRect().left;
  const stepAt = (x) => {
    const [x0, x1] = xRange();
    return Math.max(x0, Math.min(x1, x0 + ((x - frame.left) / frame.width) * (x1 - x0)));
  };
  const show = (step) => place.querySelectorAll(".chart").forEach((one) => one.show?.(step));
  place.addEventListener("pointerdown", (event) => {
    if (event.button || positionOf(event) < frame.left - 6) return;
    from = { x: positionOf(event), finding: event.target.closest("[data-finding]")?.dataset.finding };
    if (event.pointerType === "mouse") place.setPointerCapture(event.pointerId);
  });
  place.addEventListener("pointermove", (event) => {
    const x = positionOf(event), isInside = x >= frame.left && x <= frame.left + frame.width;
    if (from && event.pointerType === "mouse" && Math.abs(x - from.x) > 6) {
      const [a, b] = [from.x, x].sort((p, q) => p - q).map((p) => Math.max(frame.left, Math.min(frame.left + frame.width, p)));
      Object.assign(box.style, { left: `${a}px`, width: `${b - a}px` });
      place.append(box);
    }
    show(isInside || from ? stepAt(x) : null);
  });
  place.addEventListener("pointerup", (event) => {
    const x = positionOf(event), start = from;
    from = null;
    box.remove();
    if (!start) return;
    if (Math.abs(x - start.x) > 6) return zoom([stepAt(start.x), stepAt(x)].sort((a, b) => a - b), state.y);
    if (start.finding !== undefined) return chooseFinding(Number(start.finding));
    const c = columnAt(stepAt(x));
    if (c !== null && x <= frame.left + frame.width) chooseCell({ i: state.cell?.i ?? 0, c }, false);
  });
  for (const end of ["pointerleave", "pointercancel"]) {
    place.addEventListener(end, () => {
      from = null;
      box.remove();
      show(null);
    });
  }
  place.addEventListener("dblclick", showAll);
}
