// Handles user input, and draws the page when it opens.

function choices(id, options, chosen, choose, disabled = []) {
  const focused = $(id).contains(document.activeElement);
  $(id).replaceChildren(...options.map(([key, text]) => element("button", {
    type: "button", "aria-pressed": String(key === chosen), disabled: disabled.includes(key) ? "" : null, onclick: () => choose(key) }, text)));
  if (focused) $(id).querySelector("[aria-pressed=true]")?.focus();
}
// Applies a change of the state, and redraws the parts that depend on it.
async function set(change) {
  Object.assign(state, change);
  const has = (...keys) => keys.some((key) => key in change);
  if (has("kind", "statistic")) {
    const [kind, statistic] = [state.kind, state.statistic];
    const found = C ? await matrix(kind, statistic) : null;
    if (kind !== state.kind || statistic !== state.statistic) return; // another kind or statistic was chosen meanwhile
    state.matrix = found;
    choices("statistics", Object.entries(STATISTICS), statistic, (key) => set({ statistic: key }));
    choices("kinds", page.kinds.length > 1 ? page.kinds.map((key) => [key, key]) : [], kind, (key) => set({ kind: key }));
  }
  if (has("kind", "statistic", "x", "y", "shown")) drawCells();
  else paint();
  if (has("kind", "statistic", "shown")) drawLegend();
  if (has("finding")) [...$("findings").querySelectorAll("button")].forEach((b, k) => b.setAttribute("aria-pressed", String(k === state.finding)));
  $("reset").disabled = state.x === null && state.y === null && state.finding === null;
  if (has("kind", "statistic", "x", "cell", "tensor")) drawCharts();
  if (has("kind", "cell", "tensor", "scope", "sort", "shown", "allRows")) await drawTable();
}
function zoom(x, y) {
  const clamp = ([a, b], low, high, least) => {
    const size = Math.min(Math.max(b - a, least), high - low), start = Math.min(Math.max((a + b - size) / 2, low), high - size);
    return size >= high - low ? null : [start, start + size];
  };
  const least = 3 * (C ? (whole_x[1] - whole_x[0]) / C : 1);
  set({ x: x && clamp(x, ...whole_x, least), y: y && clamp(y.map(Math.round), 0, state.shown.length, 1), hover: null });
  showTooltip(null);
}
const showAll = () => set({ x: null, y: null, finding: null, hover: null });
function chooseTensor(tensor, more = {}) {
  set({ tensor, ...more });
}
function chooseCell(cell, withTensor = true) {
  set({ cell, scope: "step", ...(withTensor ? { tensor: state.shown[cell.i] } : {}) });
}
function chooseFinding(k) {
  const finding = page.findings[k], least = C ? (whole_x[1] - whole_x[0]) / C : 1;
  const pad = Math.max(12 * least, (finding.last_step - finding.first_step) * 0.25);
  const change = { finding: k, cell: null, scope: "run", hover: null, y: null };
  if (finding.tensor !== null) {
    if (!state.shown.includes(finding.tensor)) search("");
    Object.assign(change, { tensor: finding.tensor, kind: finding.kind ?? state.kind,
      statistic: finding.rule === "dead" ? "zero_fraction" : "norm" });
    const place = state.shown.indexOf(finding.tensor);
    if (state.shown.length > 60) change.y = [Math.max(0, place - 20), Math.min(state.shown.length, Math.max(40, place + 20))];
  } else change.tensor = null;
  const x = [Math.max(whole_x[0], finding.first_step - pad), Math.min(whole_x[1], finding.last_step + pad)];
  change.x = x[1] - x[0] >= (whole_x[1] - whole_x[0]) * 0.999 ? null : x;
  set(change);
  if (canvas.getBoundingClientRect().top < 0 || canvas.getBoundingClientRect().top > innerHeight - 200) {
    $("overview").scrollIntoView({ block: "start" });
  }
  say(`${finding.severity}: ${finding.message}`);
}
const say = (text) => { $("said").textContent = text; };
function search(text) {
  $("search").value = text;
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  const shown = names.map((_, i) => i).filter((i) => words.every((word) => names[i].toLowerCase().includes(word)));
  set({ shown, y: null, hover: null, cell: null, scope: "run" });
  say(`${whole(shown.length)} of ${plural(names.length, "tensor")}`);
}

function drawHeader() {
  $("title").textContent = page.title;
  $("state").textContent = page.state.text;
  $("state").className = page.state.mood;
  $("facts").replaceChildren(...page.facts.map(([term, text]) => element("div", {}, element("dt", {}, term), element("dd", {}, text))));
  $("fault").hidden = !page.fault;
  if (page.fault) $("fault").replaceChildren(element("strong", {}, page.fault[0]), ...page.fault.slice(1).map((text) => element("div", {}, text)));
}
drawHeader();
drawFindings();
document.querySelector(".columns").classList.toggle("quiet", page.findings.length === 0);
$("nothing").hidden = page.range !== null;
$("nothing").textContent = "No step is on disk yet. Write this page again when the run has written its first steps.";
document.querySelector("main").hidden = page.range === null;
if (page.range === null) document.documentElement.dataset.ready = "empty";
else {
  $("cells").closest(".card").hidden = $("table-body").closest(".card").hidden = C === 0;
  listenToMap();
  measure();
  $("reset").addEventListener("click", showAll);
  $("history-close").addEventListener("click", () => set({ tensor: null }));
  $("table-more").addEventListener("click", () => set({ allRows: true }));
  $("search").addEventListener("input", (event) => search(event.target.value));
  document.addEventListener("keydown", (event) => {
    if (event.key !== "/" || event.target === $("search")) return;
    event.preventDefault();
    $("search").focus();
  });
  const redraw = () => { drawCells(); drawLegend(); drawCharts(); };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  new ResizeObserver(() => { if (canvas.parentElement.clientWidth !== Math.round(canvas.width / frame.ratio)) redraw(); }).observe($("map"));
  document.addEventListener("DOMContentLoaded", drawCharts);
  set({ kind: state.kind, statistic: state.statistic }).then(() => requestAnimationFrame(() => {
    performance.mark("map"); // the time to open the page is measured up to here
    document.documentElement.dataset.ready = "map";
  }));
}
