// The list of findings, and the table of tensors.

function drawFindings() {
  const button = (finding, k) => element("button", { type: "button", class: `finding ${finding.severity}`, "aria-pressed": "false", onclick: () => chooseFinding(k) },
    element("span", { class: "what" }, element("b", {}, `${SEVERITIES[finding.severity].mark} ${finding.severity}`),
      element("span", { class: "mono" }, finding.rule), element("span", {}, steps(finding.first_step, finding.last_step))),
    element("span", { class: "message" }, ...breakable(finding.message)),
    ...(finding.tensor === null || finding.message.includes(rowsOf(finding.kind).names[finding.tensor]) ? [] : [element("span", { class: "name" }, ...breakable(cut(label(finding.kind, finding.tensor), 200)))]),
    element("span", { class: "advice" }, ...breakable(finding.advice)));
  // a headline, and below it what belongs to it or follows from it
  const items = [];
  page.findings.forEach((finding, k) => {
    if (finding.under === null) items.push({ head: button(finding, k), below: [] });
    else items.at(-1).below.push(button(finding, k));
  });
  const count = (n) => `${whole(n)} more ${n === 1 ? "finding" : "findings"} from this cause`;
  const total = page.findings.length + page.more_findings, from = items.length < total ? ` from ${whole(items.length)} ${items.length === 1 ? "cause" : "causes"}` : "";
  $("findings-title").textContent = total ? `Findings (${whole(total)}${from}${page.more_findings ? `, ${whole(page.more_findings)} not shown` : ""})` : "Findings";
  $("findings-card").classList.toggle("none", !items.length);
  $("findings").replaceChildren(...(items.length
    ? items.map(({ head, below }) => element("li", {}, head, ...(below.length ? [element("details", {}, element("summary", {}, count(below.length)), ...below)] : [])))
    : [element("li", { class: "note" }, "No rule reported a finding in this run.")]));
}

// The columns of the table: the key that sorts, the heading, and the text of a row.
const fieldsOf = (kind) => [
  ["name", "tensor", (r) => r.name], ["score", "flags", (r) => r.flags],
  ...kindOf(kind).statistics.map(({ name, heading, style }) => [name, heading, (r) => (style === "fraction" ? percent : number)(r[name])]),
  ["at", "largest at", (r) => (r.at === null ? "–" : whole(r.at))], ["broken", "NaN/Inf steps", (r) => whole(r.broken)],
];
// Worst first: NaN or Inf, then exploding, then dead or vanishing, then the rest; within each, by non-finite steps, then norm.
const scoreOf = (words) => (words.NaN || words.Inf ? 3 : words.exploding ? 2 : words.dead || words.vanishing ? 1 : 0);
function runRows() {
  const all = page.summary[state.kind];
  return state.shown.map((row) => ({
    ...Object.fromEntries(Object.entries(all.largest).map(([statistic, values]) => [statistic, values[row]])),
    row, name: names[row], at: all.at[row], broken: all.broken[row], score: scoreOf(all.flags[row]),
    flags: Object.entries(all.flags[row]).map(([word, n]) => `${word} × ${whole(n)}`).join(", "),
  }));
}
async function stepRows(c) {
  const statistics = statisticsOf(state.kind), { flags } = kindOf(state.kind);
  const found = await Promise.all(statistics.map((statistic) => matrix(state.kind, statistic)));
  // null stands for infinity, which JSON lacks; a comparison would treat null as 0
  const [vanishing, exploding, dead] = ["vanishing", "exploding", "dead"].map((name) => page.thresholds[name] ?? Infinity);
  return state.shown.map((row) => {
    const values = Object.fromEntries(statistics.map((statistic, k) => [statistic, cellValue(found[k], row, c)]));
    const { norm = null, zero_fraction = null } = values, broken = norm !== null && !Number.isFinite(norm), words = {};
    if (broken) words[number(norm)] = 1;
    else if (flags.includes("exploding") && norm > exploding) words.exploding = 1;
    else if (flags.includes("vanishing") && norm !== null && norm < vanishing) words.vanishing = 1;
    if (flags.includes("dead") && zero_fraction !== null && zero_fraction >= dead) words.dead = 1;
    return { ...values, row, name: names[row], broken: Number(broken), score: scoreOf(words), flags: Object.keys(words).join(", ") };
  });
}
const rank = (x) => (x === null || x === undefined ? -Infinity : Number.isNaN(x) ? Infinity : x);
// The number of letters for which a name has room, beside the flags and the first numbers.
const nameLength = () => Math.max(18, Math.min(72, Math.floor((0.42 * document.querySelector(".scroll").clientWidth) / 7.3)));
// A flag stays on one line.
const flagsOf = (text) => text.split(", ").flatMap((flag, k) => [k ? ", " : "", element("span", {}, flag)]);
let tables = 0;
async function drawTable() {
  const mine = ++tables;
  const at = state.scope === "step" ? state.cell : null, { key, down } = state.sort;
  const rows = at ? await stepRows(at.c) : runRows();
  if (mine !== tables) return; // a newer call is drawing the table
  const [first] = statisticsOf(state.kind), isLow = kindOf(state.kind).statistics.some(({ style }) => style === "cosine");
  const byKey = (a, b) => (key === "name" ? a.row - b.row : rank(a[key]) - rank(b[key]) || rank(a.broken) - rank(b.broken) || rank(a[first]) - rank(b[first]) || 0);
  rows.sort((a, b) => (down ? byKey(b, a) : byKey(a, b)));
  const fields = fieldsOf(state.kind).filter(([id]) => !at || (id !== "at" && id !== "broken"));
  $("table-head").replaceChildren(...fields.map(([id, title]) =>
    element("th", { scope: "col", "aria-sort": id === key ? (down ? "descending" : "ascending") : "none" },
      element("button", { type: "button", onclick: () => sortBy(id) }, title + (id === key ? (down ? " ▾" : " ▴") : "")))));
  const kept = state.allRows ? rows : rows.slice(0, 25);
  const most = nameLength(), short = shortened(kept.map(({ name }) => name), (text) => text.length <= most);
  $("table-body").replaceChildren(...kept.map((r, k) =>
    element("tr", r.row === state.tensor ? { class: "chosen" } : {}, ...fields.map(([id, , text]) => (id === "name"
      ? element("td", {}, element("button", { type: "button", title: r.name, onclick: () => chooseTensor(r.row) }, short[k]))
      : element("td", (id === "broken" || id === "score") && r.score === 3 ? { class: "bad" } : {}, ...(id === "score" ? flagsOf(text(r)) : [text(r)])))))));
  choices("scopes", [["run", "over the run"], ["step", state.cell ? `at ${steps(columns.first[state.cell.c], columns.last[state.cell.c])}` : "at a step: click the map"]],
    state.scope, (scope) => set({ scope }), state.cell === null ? ["step"] : []);
  $("table-note").textContent = rows.length === 0 ? "No tensor name matches the search." :
    at ? `${plural(rows.length, "tensor")}, with the values that the map shows for ${page.binned > 1 ? "these steps" : "this step"}.` :
    `${plural(rows.length, "tensor")}; each number is the largest finite value in the run${isLow ? ", or the lowest cosine" : ""}; “× n” after a flag means that it was set in n steps.`;
  $("table-more").hidden = kept.length === rows.length;
  $("table-more").textContent = `Show all ${whole(rows.length)}`;
}
function sortBy(key) {
  set({ sort: { key, down: state.sort.key === key ? !state.sort.down : key !== "name" } });
}
