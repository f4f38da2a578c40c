// Decodes the matrices of codes when they are first shown, and draws one of them as an image.

const decoded = new Map();
function matrix(kind, statistic) {
  const key = `${kind} ${statistic}`;
  if (!decoded.has(key)) {
    const entry = page.matrices[kind][statistic];
    decoded.set(key, entry ? decode(entry) : rootMeanSquare(kind));
  }
  return decoded.get(key);
}
async function decode({ id, low, high, linear }) {
  const text = atob($(id).textContent);
  const packed = new Uint8Array(text.length);
  for (let i = 0; i < packed.length; i++) packed[i] = text.charCodeAt(i);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const bytes = new Uint8Array(await new Response(stream).arrayBuffer());
  const codes = new Uint16Array(bytes.length / 2); // all high bytes, then all low bytes
  for (let i = 0; i < codes.length; i++) codes[i] = (bytes[i] << 8) | bytes[codes.length + i];
  return { codes, low, high, linear };
}
async function rootMeanSquare(kind) {
  const norm = await matrix(kind, "norm");
  const shift = page.summary[kind].numel.map((n) => Math.log10(Math.max(n, 1)) / 2);
  const low = norm.low - Math.max(0, ...shift), high = norm.high;
  const codes = new Uint16Array(norm.codes.length);
  const factor = (norm.high - norm.low) / (high - low);
  for (let row = 0, k = 0; row < names.length; row++) {
    const offset = SMALLEST + ((norm.low - shift[row] - low) / (high - low)) * (LARGEST - SMALLEST) + 0.5;
    for (let c = 0; c < C; c++, k++) {
      const code = norm.codes[k];
      codes[k] = code < SMALLEST || code > LARGEST ? code : offset + (code - SMALLEST) * factor;
    }
  }
  return { codes, low, high, linear: false };
}
function valueOf({ low, high, linear }, code) {
  if (code < SMALLEST) return code === ZERO ? 0 : null;
  if (code > LARGEST) return code === NAN ? NaN : Infinity;
  const at = low + ((code - SMALLEST) / (LARGEST - SMALLEST)) * (high - low);
  return linear ? at : 10 ** at;
}
const cellValue = (m, row, c) => valueOf(m, m.codes[row * C + c]);

// The range of the colour scale: all values except the lowest and highest 0.5 %, and at least one decade.
function span(m) {
  if (m.span) return m.span;
  if (m.linear) return (m.span = [0, 1]);
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
const edges = (() => {
  const gaps = columns.first.slice(1).map((first, c) => first - columns.last[c]);
  const usual = gaps.length ? gaps.toSorted((a, b) => a - b)[gaps.length >> 1] : 1;
  const half = (gap) => Math.min(gap ?? usual, 1.5 * usual) / 2;
  return {
    left: Float64Array.from(columns.first, (first, c) => first - half(gaps[c - 1])),
    right: Float64Array.from(columns.last, (last, c) => last + half(gaps[c])),
  };
})();
const whole_x = page.range ? [page.range[0] - 0.5, page.range[1] + 0.5] : [0, 1];
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
const yRange = () => state.y ?? [0, state.shown.length];

const canvas = $("cells");
const base = document.createElement("canvas");
const frame = { left: 190, right: 26, top: 8, bottom: 26, width: 0, height: 0, ratio: 1 };

function measure() {
  const outer = canvas.parentElement.clientWidth;
  frame.left = outer < 560 ? 92 : 190;
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
function palette(m) {
  const mixed = new Uint32Array(65536);
  const stops = VIRIDIS.map(parts), [low, high] = span(m);
  for (let code = SMALLEST; code <= LARGEST; code++) {
    const at = m.low + ((code - SMALLEST) / (LARGEST - SMALLEST)) * (m.high - m.low);
    const place = Math.max(0, Math.min(1, (at - low) / (high - low))) * (stops.length - 1);
    const k = Math.min(Math.floor(place), stops.length - 2), part = place - k;
    mixed[code] = pack(stops[k].map((from, i) => Math.round(from + part * (stops[k + 1][i] - from))));
  }
  mixed[0] = pixel(colour("blank"));
  mixed[ZERO] = pack(stops[0]);
  mixed[INF] = mixed[NAN] = pixel(colour("broken"));
  return mixed;
}

// Draws all cells in view; cells that share a pixel show their largest code.
function drawCells() {
  measure();
  const m = state.matrix;
  if (!m || !C) return;
  const W = Math.round(frame.width * frame.ratio), H = Math.round(frame.height * frame.ratio);
  const [x0, x1] = xRange(), [y0, y1] = yRange(), colours = palette(m);
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
  let last = -1;
  for (let p = 0; p < H; p++) {
    const top = rowAt(p), next = rowAt(p + 1), bottom = Math.max(top + 1, next);
    if (hasGaps && next > top) {
      pixels.fill(gap, p * W, (p + 1) * W);
      continue;
    }
    if (top === last && next === top) {
      pixels.copyWithin(p * W, (p - 1) * W, p * W);
      continue;
    }
    line.fill(0);
    for (let i = top; i < bottom && i < state.shown.length; i++) {
      const row = state.shown[i] * C;
      for (let q = 0; q < W; q++) {
        for (let c = from[q]; c < to[q]; c++) if (m.codes[row + c] > line[q]) line[q] = m.codes[row + c];
      }
    }
    for (let q = 0; q < W; q++) {
      pixels[p * W + q] = colours[line[q]];
      if (line[q] > LARGEST) broken.push([q, p]);
    }
    last = top;
  }
  // a single NaN or Inf among a million cells must be visible, so its mark has a minimum size
  const grow = (size) => Math.max(0, Math.round(2.5 * frame.ratio - size / 2));
  const across = grow(W / Math.max(1, columnAfter(x1) - columnAfter(x0))), down = hasGaps ? 0 : grow(1 / each);
  for (const [q, p] of broken) {
    for (let y = Math.max(0, p - down); y <= Math.min(H - 1, p + down); y++) {
      pixels.fill(colours[NAN], y * W + Math.max(0, q - across), y * W + Math.min(W, q + across + 1));
    }
  }
  context.putImageData(image, 0, 0);
  paint();
}
