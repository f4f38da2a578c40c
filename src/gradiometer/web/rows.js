// The rows of the map: tensors, and folded modules, which are rows of several tensors.

// rows, so that every row has room for its name; a narrow screen has room for short ones
const mostUnfolded = () => (innerWidth < 640 ? 20 : 40);
const DEEPEST = 12; // modules below are not folded

// Returns the rows if modules are folded from a depth on, except for toggled ones.
function rowsAt(level, toggled) {
  const paths = state.shown.map((tensor) => {
    const words = names[tensor].split(".");
    return words.slice(0, -1).slice(0, DEEPEST).map((_, k) => words.slice(0, k + 1).join("."));
  });
  const sizes = new Map();
  for (const path of paths) for (const module of path) sizes.set(module, (sizes.get(module) ?? 0) + 1);
  const found = new Map();
  state.shown.forEach((tensor, k) => {
    const module = paths[k].find((name, depth) => sizes.get(name) > 1 && (depth + 1 >= level) !== toggled.has(name));
    const key = module === undefined ? tensor : `module ${module}`;
    if (!found.has(key)) found.set(key, { name: module ?? names[tensor], isFolded: module !== undefined, members: [] });
    found.get(key).members.push(tensor);
  });
  return [...found.values()];
}
// Returns the depths at which folding gives different rows, as [level, rows]; the last folds nothing.
function levels() {
  const deepest = Math.max(1, ...state.shown.map((tensor) => names[tensor].split(".").length)), found = [];
  for (let level = 1; level <= Math.min(deepest - 1, DEEPEST); level++) {
    const count = rowsAt(level, new Set()).length;
    if (count !== found.at(-1)?.[1] && count < state.shown.length) found.push([level, count]);
  }
  return [...found, [Infinity, state.shown.length]];
}
function layoutRows() {
  state.levels = levels();
  const usual = state.levels.filter(([, count]) => count <= mostUnfolded()).at(-1) ?? state.levels[0];
  state.folds = state.level ?? usual[0];
  state.rows = rowsAt(state.folds, state.toggled);
  state.rowOf = new Map(state.rows.flatMap(({ members }, i) => members.map((tensor) => [tensor, i])));
}
// Returns the module that a click on a row's name unfolds, or folds: the innermost one with several tensors.
function moduleOf(i) {
  const { name, isFolded, members } = state.rows[i], words = name.split(".").slice(0, DEEPEST + 1);
  if (isFolded) return name;
  for (let depth = words.length - 1; depth > 0; depth--) {
    const module = words.slice(0, depth).join(".");
    if (state.shown.some((tensor) => tensor !== members[0] && names[tensor].startsWith(`${module}.`))) return module;
  }
  return null;
}
function toggleRow(i) {
  const module = moduleOf(i);
  if (module === null) return;
  say(`${module} ${state.rows[i].isFolded ? "unfolded" : "folded"}`);
  const toggled = new Set(state.toggled);
  if (!toggled.delete(module)) toggled.add(module);
  set({ toggled, y: null, hover: null, cell: null, scope: "run" });
}
// Unfolds the modules around a tensor.
function reveal(tensor) {
  const toggled = new Set(state.toggled);
  for (;;) {
    const row = rowsAt(state.folds, toggled).find(({ members }) => members.includes(tensor));
    if (!row?.isFolded) return toggled;
    if (!toggled.delete(row.name)) toggled.add(row.name);
  }
}
// Returns the tensor of a row that the map shows in a column.
function memberAt({ i, c }) {
  const { codes } = view(), { members } = state.rows[i];
  return members.reduce((worst, tensor) => (codes[tensor * C + c] > codes[worst * C + c] ? tensor : worst));
}
