// The data of the page, the current selection, and functions that format values.
//
// The scripts in this folder are concatenated into the body of one function in the page. All data of the
// run is inserted as text (textContent, canvas text).

const $ = (id) => document.getElementById(id);
const data = JSON.parse($("data").textContent);
// of the run that is shown, see `bind`; C is the number of columns of its map, and names are those of its rows
let page, names, columns, C, edges;
let whole_x; // the steps of all runs

// the kinds of tensors, their rows and their statistics are data of the run
const kindOf = (name, run = page) => run.kinds.find((kind) => kind.name === name);
const rowsOf = (kind, run = page) => run.rows[kindOf(kind, run)?.rows ?? "parameter"];
const statisticsOf = (kind, run = page) => (kindOf(kind, run)?.statistics ?? []).map(({ name }) => name);
const statisticOf = (name, kind = state.kind) => kindOf(kind).statistics.find((one) => one.name === name);
const nameOf = (statistic) => statisticOf(statistic).heading;
const isShare = (statistic) => statisticOf(statistic).style === "fraction";
const SEVERITIES = { error: { mark: "✖" }, warning: { mark: "▲" }, info: { mark: "●" } };
// the places of findings in the order in which marks are drawn: the worst last, above the others
const drawOrder = (findings, words = Object.keys(SEVERITIES)) => findings.map((_, k) => k)
  .sort((i, j) => words.indexOf(findings[j].severity) - words.indexOf(findings[i].severity) || j - i);
// codes of a cell: 0 means not measured, ZERO means exactly 0, SMALLEST to LARGEST are values
const [ZERO, SMALLEST, LARGEST, INF, NAN] = [1, 2, 65533, 65534, 65535];
// the lightness of both scales increases, so that they can be read in greyscale; the middle of the second is grey
const VIRIDIS = ["#440154", "#482475", "#414487", "#355f8d", "#2a788e", "#21918c", "#22a884", "#44bf70", "#7ad151", "#bddf26", "#fde725"];
const CIVIDIS = ["#00316f", "#2c4670", "#48566f", "#606570", "#777777", "#908d79", "#aca274", "#c9b969", "#e6d055", "#fee838"];

const state = {
  run: 0, kind: null, statistic: null, scale: "relative",
  matrices: [], // of each run, the decoded matrix of this kind and statistic; null if the run has none
  matrix: null, // that of the run that is shown
  x: null, y: null, // the zoom: a range of steps and of rows; null for all
  query: "", shown: [], // the search, and the tensors that match
  level: null, toggled: new Set(), rows: [], // see rows.js
  hover: null, cell: null, // { i, c }: a row and a column
  tensor: null, finding: null, drag: null,
  scope: "run", sort: { key: "score", down: true }, allRows: false,
};

const whole = (x) => x.toLocaleString("en-US");
function number(x) {
  if (x === null || x === undefined) return "–";
  if (!Number.isFinite(x)) return Number.isNaN(x) ? "NaN" : x > 0 ? "Inf" : "−Inf";
  if (x === 0) return "0";
  const size = Math.abs(x);
  return (size >= 0.001 && size < 1e5 ? String(Number(x.toPrecision(3))) : x.toExponential(2)).replace("-", "−");
}
function percent(x) {
  if (x === null || x === undefined || !Number.isFinite(x)) return number(x);
  if (x === 0 || x === 1) return x ? "100" : "0"; // only an exact 0 or 100 is shown as such
  return x < 0.001 ? "<0.1" : Math.min(99.9, 100 * x).toFixed(1);
}
const shownAs = (statistic, x) => (isShare(statistic) ? percent(x) + (x === null ? "" : " %") : number(x));
const steps = (first, last) => (first === last ? `step ${whole(first)}` : `steps ${whole(first)} to ${whole(last)}`);
const plural = (n, one, many = `${one}s`) => `${whole(n)} ${n === 1 ? one : many}`;
const label = (kind, i) => rowsOf(kind).names[i] + (kindOf(kind)?.suffix ?? "");
const wordOf = (kind) => kind.replaceAll("_", " ");
const cut = (text, n) => (text.length > n ? `${text.slice(0, n / 2)}…${text.slice(-n / 2)}` : text);

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== null) made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}
function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
