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
// the lightness of the first increases, so that it can be read in greyscale; in the others what is usual recedes
const VIRIDIS = ["#440154", "#482475", "#414487", "#355f8d", "#2a788e", "#21918c", "#22a884", "#44bf70", "#7ad151", "#bddf26", "#fde725"];
const AWAY = { 
  light: ["#062a5c", "#2b6cb3", "#8bb8de", "#d6e1ec", "#e8ebee", "#eee6d0", "#e6c25c", "#ad7800", "#553700"],
  dark: ["#b5d8ff", "#5a9fe6", "#2f67a3", "#2b3f55", "#2a2f37", "#4a4128", "#8a6914", "#d9aa2f", "#ffe9a3"],
};

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

const whole = (x) => x.toLocaleString("en-US", { maximumFractionDigits: 4 });
// The format of all numbers on the page, of ticks as of tables: three significant digits without trailing zeros,
// from 0.01 to 9,990 in full and otherwise as 1.2e−4. `number` in stats/text_table.py is the same for text.
function number(x) {
  if (x === null || x === undefined) return "–";
  if (!Number.isFinite(x)) return Number.isNaN(x) ? "NaN" : x > 0 ? "Inf" : "−Inf";
  const rounded = Number(x.toPrecision(3)), size = Math.abs(rounded);
  if (size === 0) return "0";
  if (size >= 0.01 && size < 1e4) return whole(rounded).replace("-", "−");
  return rounded.toExponential().replace("+", "").replaceAll("-", "−");
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
// Returns names that `fits(name, k)` says are short enough, where k is their place. Long ones are shortened in the middle to whole words between
// dots; if names would be alike or words would break, at the beginning, or without what the long ones begin with.
function shortened(texts, fits) {
  const isLong = texts.map((text, k) => text.length > 200 || !fits(text, k)), long = texts.filter((_, k) => isLong[k]).toSorted();
  if (!long.length) return texts;
  const [first, last] = [long[0], long.at(-1)];
  let same = 0;
  while (same < first.length && first[same] === last[same]) same++;
  const common = first.lastIndexOf(".", same - 1) + 1;
  let best = null;
  for (const [start, heads] of [[0, 1], [0, 0], [common, 1], [common, 0]]) {
    let broken = 0;
    const found = texts.map((text, k) => {
      if (!isLong[k]) return text;
      const own = (one) => fits(one, k), whole = elided(text.slice(start), start ? "…" : "", own, heads);
      broken += whole === null;
      return whole ?? clipped(text, own);
    });
    const score = new Set(found).size - 0.5 * broken;
    if (best === null || score > best.score) best = { score, found };
  }
  return best.found;
}
// Returns as many words of a name as fit, of the end rather than of the beginning; null if none do.
function elided(text, before, fits, heads) {
  if (text.length > 200) return null;
  if (before && fits(before + text)) return before + text;
  const words = text.split("."), n = words.length;
  for (let kept = n - 1; kept > heads; kept--) {
    for (let tail = kept - heads; tail >= (heads ? 1 : kept); tail--) {
      const found = (heads ? before : "") + [...words.slice(0, kept - tail), `…${words.slice(n - tail).join(".")}`].join(".");
      if (fits(found)) return found;
    }
  }
  return null;
}
function clipped(text, fits) {
  let keep = Math.min(text.length, 80); // the end of a name is more specific than its beginning
  const part = () => `${text.slice(0, Math.floor(keep / 3))}…${text.slice(-Math.ceil((2 * keep) / 3))}`;
  while (keep > 2 && !fits(part())) keep--;
  return part();
}
// Returns text as nodes that wrap after a dot, lest names break inside a word.
const breakable = (text) => text.split(/(?<=[./])(?=\S)/).flatMap((part, k) => (k ? [element("wbr"), part] : [part]));
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
