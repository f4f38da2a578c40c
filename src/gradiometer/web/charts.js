// The line charts, drawn with plotly.

const CONFIG = { displayModeBar: false, responsive: true, doubleClick: false, displaylogo: false };
function layout(height, axes, shapes = []) {
  const soft = colour("soft"), line = colour("line"), at = ticks(...xRange(), Math.max(2, Math.floor(frame.width / 64)));
  const made = {
    height, margin: { l: frame.left, r: frame.right, t: 8, b: 28 }, showlegend: false, hovermode: "x", annotations: [],
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", shapes,
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
    font: { family: colour("sans"), size: 11, color: soft },
    hoverlabel: { bgcolor: colour("surface"), bordercolor: line, font: { color: colour("ink") }, align: "left" },
    xaxis: { range: [...xRange()], gridcolor: line, zeroline: false, tickvals: at, ticktext: at.map(whole), anchor: axes.at(-1).id.replace("axis", ""),
      minallowed: whole_x[0], maxallowed: whole_x[1] },
  };
  for (const { id, title, ...axis } of axes) {
    made[id] = { gridcolor: line, zeroline: false, fixedrange: true, automargin: false, exponentformat: "e", nticks: 5, ...axis };
    if (title) {
      made.annotations.push({ text: title, showarrow: false, xref: "paper", yref: "paper", x: 0, y: axis.domain[1], xanchor: "left",
        yanchor: "bottom", font: { size: 12, color: colour("ink") } });
    }
  }
  return made;
}
// The range of the values in view; on a log axis the range of exponents.
function yLimits(xs, ys, log) {
  const [x0, x1] = xRange();
  let [low, high] = [Infinity, -Infinity];
  xs.forEach((x, k) => {
    if (x < x0 || x > x1 || ys[k] === null || !Number.isFinite(ys[k]) || (log && ys[k] <= 0)) return;
    const y = log ? Math.log10(ys[k]) : ys[k];
    [low, high] = [Math.min(low, y), Math.max(high, y)];
  });
  if (low > high) return log ? [-1, 1] : [0, 1];
  const pad = Math.max((high - low) * 0.06, log ? 0.1 : Math.abs(high) * 0.02 || 0.1);
  return [low - pad, high + pad];
}
function logTicks(low, high) {
  const factors = high - low > 3 ? [1] : [1, 3], found = [];
  if (high - low < 1) {
    const even = ticks(10 ** low, 10 ** high, 4, 0).map((x) => Number(x.toPrecision(12)));
    return { tickvals: even, ticktext: even.map(number) };
  }
  const skip = Math.max(1, Math.ceil((high - low) / 5));
  for (let power = Math.floor(low); power <= high; power++) {
    if (power % skip === 0) found.push(...factors.map((k) => k * 10 ** power));
  }
  return { tickvals: found, ticktext: found.map(number) };
}
// A line with a gap where y is null; a single point between two gaps is a dot.
function series(xs, ys, name, ink, yaxis, format) {
  const sizes = ys.map((y, k) => (ys.length <= 80 || (y !== null && (ys[k - 1] ?? ys[k + 1] ?? null) === null) ? 4 : 0));
  return {
    type: "scatter", mode: sizes.some(Boolean) ? "lines+markers" : "lines", x: xs, y: ys, connectgaps: false,
    line: { color: ink, width: 1.4 }, marker: { color: ink, size: sizes }, name, yaxis, hovertemplate: `step %{x}: ${name} ${format}<extra></extra>`,
  };
}
function spans(ranges, at, ink, name, yaxis) {
  return {
    type: "scatter", mode: "lines+markers", yaxis, line: { color: ink, width: 5 }, marker: { symbol: "square", size: 6, color: ink },
    x: ranges.flatMap(([a, b]) => [a, b, null]), y: ranges.flatMap(() => [at, at, null]),
    hovertemplate: `step %{x}: ${name}<extra></extra>`,
  };
}
const isWild = (values) => { // a loss that would look flat on a linear axis
  const kept = values.filter((y) => y !== null).sort((a, b) => a - b);
  return kept.length > 0 && kept[0] > 0 && kept.at(-1) > 50 * kept[kept.length >> 1];
};

function drawOverview() {
  const { norm, loss } = page.lines;
  const traces = [], charts = [];
  if (norm.x.length || !loss.x.length) charts.push({ ...norm, name: "total gradient norm", ink: "norm", log: norm.y.some((y) => y > 0) });
  if (loss.x.length) charts.push({ ...loss, name: "loss", ink: "loss", log: isWild(loss.y) });
  const strips = [["findings", page.findings], ["not finite", page.nonfinite], ["skipped", page.skipped]].filter(([, all]) => all.length);
  const [high, strip] = [130, 17], total = charts.length * high + strips.length * strip + (strips.length ? 8 : 0);
  const axes = charts.map(({ x, y, name, ink, log }, k) => {
    const id = k ? `yaxis${k + 1}` : "yaxis", top = total - k * high;
    traces.push(series(x, y, name, colour(ink), id.replace("axis", ""), "%{y:.4~g}"));
    const [low, limit] = yLimits(x, y, log);
    return { id, type: log ? "log" : "linear", range: [low, limit], domain: [(top - high + 6) / total, (top - 18) / total],
      ...(log ? logTicks(low, limit) : {}), title: name + (log ? ", log scale" : "") };
  });
  if (strips.length) {
    const id = `yaxis${charts.length + 1}`, yaxis = id.replace("axis", "");
    strips.forEach(([word, all], k) => traces.push(
      word === "findings" ? findingMarks(all, k, yaxis) : spans(all, k, colour(word === "skipped" ? "skipped" : "broken"), word, yaxis)));
    axes.push({ id, domain: [0, (strips.length * strip) / total], range: [strips.length - 0.5, -0.5], showgrid: false,
      tickvals: strips.map((_, k) => k), ticktext: strips.map(([word]) => word) });
  }
  const line = (x, dash, ink) => ({ type: "line", xref: "x", yref: "paper", x0: x, x1: x, y0: 0, y1: 1, line: { color: ink, width: 1, dash } });
  const shapes = page.attempts.slice(1).map((first) => line(first - 0.5, "dot", colour("soft")));
  if (state.cell) shapes.push(line(columns.first[state.cell.c], "solid", colour("accent")));
  plot("overview", traces, layout(total + 36, axes, shapes));
}
function findingMarks(findings, at, yaxis) {
  return {
    type: "scatter", mode: "markers", yaxis, cliponaxis: false, x: findings.map((f) => f.first_step), y: findings.map(() => at),
    marker: { size: 9, symbol: findings.map((f) => SEVERITIES[f.severity].symbol), color: findings.map((f) => colour(f.severity)) },
    customdata: findings.map((_, k) => k), hovertemplate: "%{text}<extra></extra>",
    text: findings.map((f) => plain(`${f.severity}, ${steps(f.first_step, f.last_step)}: ${cut(f.message, 110)}`)),
  };
}
function drawHistory() {
  const card = $("history-card"), m = state.matrix;
  card.hidden = state.tensor === null || !m;
  if (card.hidden) return;
  const row = state.tensor, middle = columns.first.map((first, c) => Math.round((first + columns.last[c]) / 2));
  const values = middle.map((_, c) => cellValue(m, row, c)), scale = state.statistic === "zero_fraction" ? 100 : 1;
  const ys = values.map((x) => (x === null || !Number.isFinite(x) ? null : x * scale));
  const isBad = values.map((x) => x !== null && !Number.isFinite(x)), bad = [];
  isBad.forEach((is, c) => {
    if (is && isBad[c - 1]) bad.at(-1)[1] = columns.last[c];
    else if (is) bad.push([columns.first[c], columns.last[c]]);
  });
  const log = !m.linear && ys.some((y) => y > 0), summary = page.summary[state.kind];
  $("history-title").textContent = label(state.kind, row);
  const from = summary.at[row] === null ? "never finite" : `largest norm ${number(summary.norm[row])} at step ${whole(summary.at[row])}`;
  $("history-note").textContent = `${page.shapes[row]}, ${whole(summary.numel[row])} elements; ${from}; ` +
    (summary.broken[row] ? `NaN or Inf in ${plural(summary.broken[row], "step")}.` : "finite throughout.");
  const measured = middle.map((_, c) => c).filter((c) => values[c] !== null);
  const points = measured.map((c) => (log && ys[c] === 0 ? null : ys[c])); // a log axis has no 0
  const traces = [series(measured.map((c) => middle[c]), points, STATISTICS[state.statistic], colour("norm"), "y", "%{y:.4~g}")];
  const axes = [{ id: "yaxis", type: log ? "log" : "linear", range: yLimits(middle, ys, log), domain: [bad.length ? 0.16 : 0, 0.9],
    title: STATISTICS[state.statistic] + (log ? ", log scale" : "") }];
  if (log) Object.assign(axes[0], logTicks(...axes[0].range));
  if (bad.length) {
    traces.push(spans(bad, 0, colour("broken"), "not finite", "y2"));
    axes.push({ id: "yaxis2", domain: [0, 0.1], range: [-0.5, 0.5], showgrid: false, tickvals: [0], ticktext: ["not finite"] });
  }
  plot("history", traces, layout(210, axes));
}
function plot(id, traces, made) {
  const place = $(id), isNew = !place.data;
  Plotly.react(place, traces, made, CONFIG);
  if (!isNew) return;
  place.on("plotly_relayout", (change) => {
    if (change["xaxis.range[0]"] !== undefined) zoom([change["xaxis.range[0]"], change["xaxis.range[1]"]], state.y);
  });
  place.on("plotly_doubleclick", showAll);
  place.on("plotly_click", ({ points }) => {
    if (points[0].customdata !== undefined) chooseFinding(points[0].customdata);
    else if (columnAt(points[0].x) !== null) chooseCell({ i: state.cell?.i ?? 0, c: columnAt(points[0].x) }, false);
  });
}
function drawCharts() {
  if (!window.Plotly || $("overview").clientWidth === 0) return; // plotly loads after this script
  drawOverview();
  drawHistory();
  document.documentElement.dataset.charts = "drawn";
}
