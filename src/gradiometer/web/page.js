// Handles user input, and draws the page when it opens.

function choices(id, options, chosen, choose, disabled = []) {
  const focused = $(id).contains(document.activeElement);
  $(id).replaceChildren(...options.map(([key, text]) => element("button", {
    type: "button", "aria-pressed": String(key === chosen), disabled: disabled.includes(key) ? "" : null, onclick: () => choose(key) }, text)));
  if (focused) $(id).querySelector("[aria-pressed=true]")?.focus();
}
// Makes one run the one whose map, findings and table are shown.
function bind(run) {
  state.run = run;
  page = data.runs[run];
  ({ columns } = page);
  C = columns.first.length;
  edges = edgesOf(columns);
  const ranges = data.runs.map((one) => one.range).filter(Boolean);
  whole_x = ranges.length ? [Math.min(...ranges.map(([a]) => a)) - 0.5, Math.max(...ranges.map(([, b]) => b)) + 0.5] : [0, 1];
}
// Returns the change to a kind with other rows.
const ofKind = (kind) => ({ kind, shown: matching(state.query, kind), toggled: new Set(), y: null, hover: null, cell: null, tensor: null, scope: "run" });
// The statistics of all kinds by name, each with its heading and a kind that has it: the chosen one if it does.
function offered() {
  const found = new Map();
  for (const kind of [...page.kinds, kindOf(state.kind)]) {
    for (const { name, heading } of kind.statistics) if (!found.has(name) || kind.name === state.kind) found.set(name, { heading, kind: kind.name });
  }
  return found;
}
// Applies a change of the state, and redraws the parts that depend on it.
async function set(change) {
  if (change.kind && state.kind && !change.shown && rowsOf(change.kind) !== rowsOf(state.kind)) change = { ...change, ...ofKind(change.kind) };
  Object.assign(state, change);
  ({ names } = rowsOf(state.kind));
  const { left } = frame;
  const has = (...keys) => keys.some((key) => key in change);
  if (has("shown", "level", "toggled")) layoutRows();
  if (has("run", "kind", "statistic")) {
    const { run, kind } = state;
    if (!statisticsOf(kind).includes(state.statistic)) [state.statistic] = statisticsOf(kind);
    const { statistic } = state;
    const found = await Promise.all(data.runs.map((_, k) => matrix(kind, statistic, k)));
    if (run !== state.run || kind !== state.kind || statistic !== state.statistic) return; // another one was chosen meanwhile
    state.matrices = found;
    state.matrix = found[run];
    // those of other kinds are offered too
    const all = offered();
    choices("statistics", [...all].map(([key, { heading }]) => [key, heading]), statistic, (key) => set({ statistic: key, kind: all.get(key).kind }));
    choices("kinds", page.kinds.length > 1 ? page.kinds.map(({ name }) => [name, wordOf(name)]) : [], kind, (key) => set({ kind: key }));
  }
  if (has("run", "kind", "statistic", "x", "y", "shown", "scale", "level", "toggled")) drawCells();
  else paint();
  if (has("run", "kind", "statistic", "shown", "scale", "level", "toggled")) drawLegend();
  if (has("finding")) {
    [...$("findings").querySelectorAll("button")].forEach((b, k) => {
      b.setAttribute("aria-pressed", String(k === state.finding));
      if (k === state.finding) b.closest("details")?.setAttribute("open", "");
    });
  }
  $("reset").disabled = state.x === null && state.y === null && state.finding === null;
  if (has("run", "kind", "statistic", "x", "cell", "tensor") || frame.left !== left) drawCharts();
  save();
  if (has("run", "kind", "cell", "tensor", "scope", "sort", "shown", "allRows")) await drawTable();
}
function zoom(x, y) {
  const clamp = ([a, b], low, high, least) => {
    const size = Math.min(Math.max(b - a, least), high - low), start = Math.min(Math.max((a + b - size) / 2, low), high - size);
    return size >= high - low ? null : [start, start + size];
  };
  const least = 3 * (C ? (whole_x[1] - whole_x[0]) / C : 1);
  set({ x: x && clamp(x, ...whole_x, least), y: y && clamp(y.map(Math.round), 0, state.rows.length, 1), hover: null });
  showTooltip(null);
}
const showAll = () => set({ x: null, y: null, finding: null, hover: null });
function chooseTensor(tensor, more = {}) {
  set({ tensor, ...more });
}
function chooseCell(cell, withTensor = true) {
  set({ cell, scope: "step", ...(withTensor && state.matrix ? { tensor: memberAt(cell) } : {}) });
}
function chooseFinding(k) {
  const finding = page.findings[k], least = C ? (whole_x[1] - whole_x[0]) / C : 1;
  const pad = Math.max(12 * least, (finding.last_step - finding.first_step) * 0.25);
  const change = { finding: k, cell: null, scope: "run", hover: null, y: null };
  if (finding.tensor !== null) {
    const isDrawn = (name) => name && rowsOf(name) === rowsOf(finding.kind) && kindOf(name);
    const kind = [finding.kind, state.kind, ...page.kinds.map(({ name }) => name)].find(isDrawn);
    if (rowsOf(kind) !== rowsOf(state.kind)) {
      Object.assign(state, ofKind(kind));
      ({ names } = rowsOf(kind));
      layoutRows();
      change.shown = state.shown;
    }
    if (!state.shown.includes(finding.tensor)) search("");
    const shows = { dead: "zero_fraction", dead_units: "zero_channel_fraction", growing_logits: "abs_max", collapsing_router: "abs_max", stuck: "stuck_fraction", update_ratio: "update_ratio" };
    Object.assign(change, { tensor: finding.tensor, kind, toggled: reveal(finding.tensor), statistic: shows[finding.rule] ?? null });
    const rows = rowsAt(state.folds, change.toggled), at = rows.findIndex(({ members }) => members.includes(finding.tensor));
    if (rows.length > 60) change.y = [Math.max(0, at - 20), Math.min(rows.length, Math.max(40, at + 20))];
  } else change.tensor = null;
  const x = [Math.max(whole_x[0], finding.first_step - pad), Math.min(whole_x[1], finding.last_step + pad)];
  change.x = x[1] - x[0] >= (whole_x[1] - whole_x[0]) * 0.999 ? null : x;
  set(change);
  if (canvas.getBoundingClientRect().top < 0 || canvas.getBoundingClientRect().top > innerHeight - 200) {
    $("overview").scrollIntoView({ block: "start" });
  }
  say(`${finding.severity}: ${finding.message}`);
}
const say = (text) => { $("announcement").textContent = text; };
function matching(text, kind = state.kind) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  const all = rowsOf(kind).names;
  return all.map((_, i) => i).filter((i) => words.every((word) => all[i].toLowerCase().includes(word)));
}
function search(text) {
  $("search").value = text;
  const shown = matching(text);
  set({ query: text, shown, toggled: new Set(), y: null, hover: null, cell: null, scope: "run" });
  say(`${whole(shown.length)} of ${plural(matching("").length, "tensor")}`);
}

function drawHeader() {
  const { runs, differ } = data, tagged = runs.map(({ title }, k) => (runs.length > 1 ? `${"AB"[k]}: ${title}` : title));
  $("title").textContent = tagged.join(", ");
  $("state").textContent = page.state.text;
  $("state").className = page.state.mood;
  $("facts").replaceChildren(...page.facts.map(([term, text]) => element("div", {}, element("dt", {}, term), element("dd", {}, text))));
  $("fault").hidden = !page.fault;
  if (page.fault) $("fault").replaceChildren(element("strong", {}, page.fault[0]), ...page.fault.slice(1).map((text) => element("div", {}, text)));
  choices("runs", runs.length > 1 ? tagged.map((text, k) => [k, cut(text, 40)]) : [], state.run, chooseRun);
  $("runs-note").hidden = runs.length === 1;
  if (runs.length === 1) return;
  const keys = STYLES.map(({ ink, dash }, k) => element("span", { class: "key" }, svg("svg", { width: 28, height: 8 },
    svg("line", { x2: 28, y1: 4, y2: 4, stroke: `var(--${ink})`, "stroke-width": 2, ...(dash ? { "stroke-dasharray": dash } : {}) })), "AB"[k]));
  const first = differ.first.map((name) => cut(name, 80)).join(", ") + (differ.more ? `, and ${whole(differ.more)} more` : "");
  $("runs-note").replaceChildren(...keys, differ.step !== null ? `The runs first differ at step ${whole(differ.step)}: ${first}`
    : `No recorded value differs in ${plural(differ.common, "common step")}${differ.same || differ.bits ? "." : ", but the runs do not have the same tensors or steps."}`,
    ...(differ.apart ? [element("br"), cut(`${differ.apart[0].toUpperCase()}${differ.apart.slice(1)}.`, 400)] : []),
    ...(differ.bits ? [element("br"), cut(`${differ.bits[0].toUpperCase()}${differ.bits.slice(1)}.`, 200)] : []));
}
// Shows the map, the findings and the table of the other run, with the same selection.
function chooseRun(run) {
  const fragment = new URLSearchParams(encoded());
  fragment.delete("run");
  fragment.delete("finding");
  if (run) fragment.set("run", "b");
  restore(fragment.toString());
}
// Draws everything.
function redraw() {
  drawHeader();
  drawFindings();
  document.querySelector(".columns").classList.toggle("quiet", page.findings.length === 0 && C === 0);
  $("cells").closest(".card").hidden = $("table-card").hidden = C === 0;
  return set({ run: state.run, kind: state.kind, statistic: state.statistic, finding: state.finding, shown: state.shown });
}

const isEmpty = data.runs.every(({ range }) => range === null);
$("nothing").hidden = !isEmpty;
$("nothing").textContent = data.live ? "No step is on disk yet." : "No step is on disk yet. Write this page again when the run has written its first steps.";
document.querySelector("main").hidden = isEmpty;
if (isEmpty) {
  bind(0);
  drawHeader();
  document.documentElement.dataset.ready = "empty";
} else {
  listenToMap();
  listenToCharts("overview");
  listenToCharts("history");
  listenToCharts("exponents");
  $("reset").addEventListener("click", showAll);
  $("history-close").addEventListener("click", () => set({ tensor: null }));
  $("table-more").addEventListener("click", () => set({ allRows: true }));
  $("search").addEventListener("input", (event) => search(event.target.value));
  document.addEventListener("keydown", (event) => {
    if (event.key !== "/" || event.target === $("search")) return;
    event.preventDefault();
    $("search").focus();
  });
  const resized = () => { drawCells(); drawLegend(); drawCharts(); drawTable(); };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", resized);
  new ResizeObserver(() => { if ($("overview").clientWidth !== frame.outer) resized(); }).observe($("overview"));
  addEventListener("hashchange", () => { if (location.hash.slice(1) !== saved) restore(location.hash.slice(1)); });
  restore(location.hash.slice(1)).then(() => requestAnimationFrame(() => requestAnimationFrame(() => {
    performance.mark("drawn"); // the first frame is on the screen: the time to open the page is measured up to here
    document.documentElement.dataset.ready = "map";
  })));
}
if (data.live) follow();
