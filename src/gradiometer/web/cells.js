// Decodes the matrices of codes when they are first shown, and draws one of them as an image.

const decoded = new Map();
let received = {}; // matrices that a server has sent, by id; the others are in the document
// Returns the matrix of a run, or null if it has none.
function matrix(kind, statistic, run = state.run) {
  const key = `${run} ${kind} ${statistic}`, one = data.runs[run], entry = one.matrices[kind]?.[statistic];
  if (!decoded.has(key)) {
    const has = one.columns.first.length > 0 && statisticsOf(kind, one).includes(statistic);
    // without a matrix, it is the root mean square
    decoded.set(key, !has ? null : entry ? decode(run, kind, entry) : rootMeanSquare(run, kind));
  }
  return decoded.get(key);
}
async function decode(run, kind, { id, low, high, linear }) {
  const bytes = await inflate(run, id);
  const codes = new Uint16Array(bytes.length / 2); // all high bytes, then all low bytes
  for (let i = 0; i < codes.length; i++) codes[i] = (bytes[i] << 8) | bytes[codes.length + i];
  const one = data.runs[run];
  return { codes, low, high, linear, page: one, names: rowsOf(kind, one).names, C: one.columns.first.length };
}
async function inflate(run, id) {
  const place = `${run}-${id}`, text = atob(received[place] ?? $(place).textContent);
  const packed = new Uint8Array(text.length);
  for (let i = 0; i < packed.length; i++) packed[i] = text.charCodeAt(i);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}
async function rootMeanSquare(run, kind) {
  const norm = await matrix(kind, "norm", run);
  const shift = norm.page.summary[kind].numel.map((n) => Math.log10(Math.max(n, 1)) / 2);
  const low = norm.low - Math.max(0, ...shift), high = norm.high;
  const codes = new Uint16Array(norm.codes.length);
  const factor = (norm.high - norm.low) / (high - low);
  for (let row = 0, k = 0; row < shift.length; row++) {
    const offset = SMALLEST + ((norm.low - shift[row] - low) / (high - low)) * (LARGEST - SMALLEST) + 0.5;
    for (let c = 0; c < norm.C; c++, k++) {
      const code = norm.codes[k];
      codes[k] = code < SMALLEST || code > LARGEST ? code : offset + (code - SMALLEST) * factor;
    }
  }
  return { ...norm, codes, low, high };
}
function valueOf({ low, high, linear }, code) {
  if (code < SMALLEST) return code === ZERO ? 0 : null;
  if (code > LARGEST) return code === NAN ? NaN : Infinity;
  const at = low + ((code - SMALLEST) / (LARGEST - SMALLEST)) * (high - low);
  return linear ? at : 10 ** at;
}
const cellValue = (m, row, c) => valueOf(m, m.codes[row * m.C + c]);

// The deviations from each tensor's usual value, the median of its values other than 0. A code is SMALLEST plus
// twice the distance of two codes, plus 1 below the usual value; LARGEST is exactly 0. So a larger code deviates more.
function relative(m) {
  if (m.relative) return m.relative;
  const codes = new Uint16Array(m.codes.length), usual = [], counts = new Uint32Array(65536);
  for (let from = 0; from < codes.length; from += m.C) {
    const row = m.codes.subarray(from, from + m.C), values = row.filter((code) => code >= SMALLEST && code <= LARGEST).sort();
    const middle = values[values.length >> 1] ?? 0;
    usual.push(valueOf(m, middle));
    for (let c = 0; c < m.C; c++) {
      const code = row[c], away = code - middle;
      const is = code === ZERO ? LARGEST : code < SMALLEST || code > LARGEST ? code
        : SMALLEST + Math.min(Math.abs(away) & ~1, LARGEST - 5) + (away < 0 ? 1 : 0);
      codes[from + c] = is;
      counts[is]++;
    }
  }
  // the scale covers all deviations except the largest 3 %, in half decades, but at least a factor of 3 and at most 100
  let total = 0, far = SMALLEST;
  for (let code = SMALLEST; code < LARGEST; code++) total += counts[code];
  for (let seen = counts[far]; seen <= total * 0.97 && far < LARGEST - 1; ) seen += counts[++far];
  const decades = ((far - SMALLEST) * (m.high - m.low)) / (LARGEST - SMALLEST);
  return (m.relative = { ...m, codes, usual, span: Math.min(4, Math.max(1, Math.ceil(2 * decades))) / 2 });
}
// Shares and cosines can be compared as they are.
const isRelative = () => state.scale === "relative" && !state.matrix.linear;
const view = () => (isRelative() ? relative(state.matrix) : state.matrix);

// The range of the colour scale: all values except the lowest and highest 0.5 %, and at least one decade.
function span(m) {
  if (m.span) return m.span;
  if (m.linear) return (m.span = [m.low, m.high]);
  const counts = new Uint32Array(65536);
  for (const code of m.codes) counts[code]++;
  let total = 0, from = SMALLEST, to = LARGEST;
  for (let code = SMALLEST; code <= LARGEST; code++) total += counts[code];
  for (let seen = counts[from]; seen <= total * 0.005 && from < LARGEST; ) seen += counts[++from];
  for (let seen = counts[to]; seen <= total * 0.005 && to > from; ) seen += counts[--to];
  const log = (code) => m.low + ((code - SMALLEST) / (LARGEST - SMALLEST)) * (m.high - m.low);
  let [low, high] = total ? [log(from), log(to)] : [-1, 0];
  if (high - low < 1) [low, high] = [(low + high) / 2 - 0.5, (low + high) / 2 + 0.5];
  return (m.span = [low, high]);
}

// A column extends half-way to its neighbours; a gap that is wider than usual stays blank.
function edgesOf({ first, last }) {
  const gaps = first.slice(1).map((step, c) => step - last[c]);
  const usual = gaps.length ? gaps.toSorted((a, b) => a - b)[gaps.length >> 1] : 1;
  const half = (gap) => Math.min(gap ?? usual, 1.5 * usual) / 2;
  return {
    left: Float64Array.from(first, (step, c) => step - half(gaps[c - 1])),
    right: Float64Array.from(last, (step, c) => step + half(gaps[c])),
  };
}
function columnAfter(step) { // the first column that ends after a step
  let [low, high] = [0, C];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (edges.right[middle] > step) high = middle;
    else low = middle + 1;
  }
  return low;
}
function columnAt(step) {
  const c = columnAfter(step);
  return c < C && edges.left[c] <= step ? c : null;
}
const xRange = () => state.x ?? whole_x;
const yRange = () => state.y ?? [0, state.rows.length];

const canvas = $("cells");
const base = document.createElement("canvas");
const frame = { left: 210, right: 26, top: 8, bottom: 26, outer: 0, width: 0, height: 0, ratio: 1 };

const isNarrow = () => frame.outer < 560;
const labelFont = () => `${isNarrow() ? 10 : 11}px ${colour("sans")}`;
// The room for names at the left of the map: that of the longest, but at most a quarter of a narrow screen.
function gutter(outer) {
  const context = canvas.getContext("2d"), longest = names.toSorted((a, b) => b.length - a.length).slice(0, 20);
  context.font = labelFont();
  const widest = Math.max(0, ...longest.map((name) => context.measureText(name.slice(0, 80)).width));
  return Math.round(Math.max(72, Math.min(widest + 26, isNarrow() ? 0.25 * outer : 230)));
}
function measure() {
  const outer = frame.outer = $("overview").clientWidth; // as wide as the map, which is hidden without tensors
  frame.left = gutter(outer);
  frame.right = isNarrow() ? 18 : 26;
  document.documentElement.dataset.gutter = frame.left;
  frame.width = Math.max(outer - frame.left - frame.right, 40);
  const rows = Math.max(yRange()[1] - yRange()[0], 1), most = Math.max(360, Math.min(600, 0.65 * innerHeight));
  frame.ratio = Math.min(devicePixelRatio || 1, 2);
  // whole pixels per row, or whole rows per pixel; otherwise alternating weights and biases cause stripes
  const room = Math.floor(Math.min(rows * 18, most) * frame.ratio);
  frame.height = (rows <= room ? rows * Math.floor(room / rows) : Math.ceil(rows / Math.ceil(rows / room))) / frame.ratio;
  const [width, height] = [outer, frame.height + frame.top + frame.bottom];
  canvas.style.height = `${height}px`;
  canvas.width = Math.round(width * frame.ratio);
  canvas.height = Math.round(height * frame.ratio);
}

const parts = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
const pack = ([r, g, b]) => ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;
const pixel = (hex) => pack(parts(hex));
const awayInks = () => AWAY[matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"];
function palette() {
  const mixed = new Uint32Array(65536), m = state.matrix, isAway = isRelative();
  const stops = (isAway ? awayInks() : VIRIDIS).map(parts), [low, high] = isAway ? [] : span(m), unit = (m.high - m.low) / (LARGEST - SMALLEST);
  for (let code = SMALLEST; code <= LARGEST; code++) {
    const away = (code & ~1) - SMALLEST;
    const at = isAway ? 0.5 + ((code & 1 ? -away : away) * unit) / (2 * relative(m).span) : (m.low + (code - SMALLEST) * unit - low) / (high - low);
    const place = Math.max(0, Math.min(1, at)) * (stops.length - 1);
    const k = Math.min(Math.floor(place), stops.length - 2), part = place - k;
    mixed[code] = pack(stops[k].map((from, i) => Math.round(from + part * (stops[k + 1][i] - from))));
  }
  mixed[0] = pixel(colour("blank"));
  mixed[isAway ? LARGEST : ZERO] = pixel(colour("zero"));
  mixed[INF] = mixed[NAN] = pixel(colour("broken"));
  return mixed;
}

// Draws all cells in view; cells that share a pixel or a folded row show their largest code.
function drawCells() {
  measure();
  if (!state.matrix || !C) return paint();
  const { codes } = view();
  const W = Math.round(frame.width * frame.ratio), H = Math.round(frame.height * frame.ratio);
  const [x0, x1] = xRange(), [y0, y1] = yRange(), colours = palette();
  const from = new Int32Array(W), to = new Int32Array(W);
  for (let p = 0; p < W; p++) {
    const end = x0 + ((x1 - x0) * (p + 1)) / W;
    from[p] = columnAfter(x0 + ((x1 - x0) * p) / W);
    to[p] = from[p] < C && edges.left[from[p]] < end ? Math.max(columnAfter(end), from[p] + 1) : from[p];
  }
  base.width = W; base.height = H;
  const context = base.getContext("2d"), image = context.createImageData(W, H);
  const pixels = new Uint32Array(image.data.buffer), line = new Uint16Array(W);
  const hasGaps = H / (y1 - y0) >= 9, gap = pixel(colour("surface"));
  const each = (y1 - y0) / H > 1 ? Math.ceil((y1 - y0) / H) : (y1 - y0) / H;
  const rowAt = (p) => y0 + Math.floor(each * p + 1e-9);
  const broken = [];
  let last = -1, inLast = [];
  for (let p = 0; p < H; p++) {
    const top = rowAt(p), next = rowAt(p + 1), bottom = Math.max(top + 1, next);
    if (hasGaps && next > top) {
      pixels.fill(gap, p * W, (p + 1) * W);
      continue;
    }
    if (top === last && next === top) {
      pixels.copyWithin(p * W, (p - 1) * W, p * W);
      broken.push(...inLast.map((q) => [q, p]));
      continue;
    }
    line.fill(0);
    inLast = [];
    for (const { members } of state.rows.slice(top, bottom)) {
      for (const tensor of members) {
        const row = tensor * C;
        for (let q = 0; q < W; q++) {
          for (let c = from[q]; c < to[q]; c++) if (codes[row + c] > line[q]) line[q] = codes[row + c];
        }
      }
    }
    for (let q = 0; q < W; q++) {
      pixels[p * W + q] = colours[line[q]];
      if (line[q] > LARGEST) inLast.push(q);
    }
    broken.push(...inLast.map((q) => [q, p]));
    last = top;
  }
  // a single NaN or Inf among a million cells must be visible, so its mark has a minimum size
  // and stripes, which also show without colour
  const striped = (x, y) => ((x + y) % (6 * Math.ceil(frame.ratio)) < 2 * Math.ceil(frame.ratio) ? gap : colours[NAN]);
  const grow = (size) => Math.max(0, Math.round(2.5 * frame.ratio - size / 2));
  const across = grow(W / Math.max(1, columnAfter(x1) - columnAfter(x0))), down = hasGaps ? 0 : grow(1 / each);
  for (const [q, p] of broken) {
    for (let y = Math.max(0, p - down); y <= Math.min(H - 1, p + down); y++) {
      for (let x = Math.max(0, q - across); x < Math.min(W, q + across + 1); x++) pixels[y * W + x] = striped(x, y);
    }
  }
  context.putImageData(image, 0, 0);
  paint();
}
