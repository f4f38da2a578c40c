// The selection as the fragment of the page's address, and the data that a server sends while a run goes on.

// Tensors, rows and steps are saved by name and number, so that a link also fits a later page of the run.
function encoded() {
  const found = new URLSearchParams(), add = (key, value) => value !== null && found.set(key, value);
  const { cell, finding, folds, level, sort } = state, one = page.findings[finding];
  if (state.run) add("run", "b");
  if (state.kind !== page.kinds[0].name) add("kind", state.kind);
  if (state.statistic !== statisticsOf(state.kind)[0]) add("statistic", state.statistic);
  if (state.scale !== "relative") add("scale", state.scale);
  if (state.query) add("search", state.query);
  if (level !== null || state.toggled.size) add("level", folds === Infinity ? "all" : folds);
  for (const name of state.toggled) found.append("toggled", name);
  if (state.tensor !== null) add("tensor", names[state.tensor]);
  if (cell) add("step", columns.first[cell.c]);
  if (cell && cell.i !== state.rowOf.get(state.tensor)) add("row", state.rows[cell.i].name);
  if (state.scope === "step") add("table", "step");
  if (one) add("finding", [one.rule, one.first_step, one.tensor === null ? "" : names[one.tensor]].join(" "));
  if (state.x) add("steps", state.x.map((x) => Number(x.toPrecision(9))).join(" "));
  if (state.y) add("rows", state.y.join(" "));
  if (sort.key !== "score" || !sort.down) add("sort", `${sort.key} ${sort.down ? "down" : "up"}`);
  return found.toString();
}
// Selects what a fragment says; whatever it says that the run does not have is ignored.
function restore(fragment) {
  const link = new URLSearchParams(fragment), among = (key, all, other) => (all.includes(link.get(key)) ? link.get(key) : other);
  const pair = (key, low, high) => {
    const found = (link.get(key) ?? "").split(" ").map(Number);
    return found.length === 2 && found.every(Number.isFinite) && low <= found[0] && found[0] < found[1] && found[1] <= high ? found : null;
  };
  bind(link.get("run") === "b" && data.runs.length > 1 ? 1 : 0);
  const kind = among("kind", page.kinds.map(({ name }) => name), page.kinds[0].name);
  ({ names } = rowsOf(kind));
  Object.assign(state, {
    kind, statistic: among("statistic", statisticsOf(kind), statisticsOf(kind)[0]), scale: among("scale", ["absolute"], "relative"),
    query: link.get("search") ?? "", toggled: new Set(link.getAll("toggled")), tensor: null, cell: null, finding: null, hover: null,
    level: link.get("level") === "all" ? Infinity : Math.trunc(Number(link.get("level"))) || null, scope: "run", x: pair("steps", ...whole_x),
  });
  state.shown = matching(state.query);
  layoutRows();
  state.y = pair("rows", 0, state.rows.length)?.map(Math.round) ?? null;
  const tensor = names.indexOf(link.get("tensor"));
  if (tensor >= 0) state.tensor = tensor;
  const c = link.has("step") && C ? columnAt(Number(link.get("step"))) : null;
  const i = link.has("row") ? state.rows.findIndex(({ name }) => name === link.get("row")) : state.rowOf.get(state.tensor) ?? -1;
  if (c !== null && i >= 0) Object.assign(state, { cell: { i, c }, scope: link.get("table") === "step" ? "step" : "run" });
  const [rule, first, ...name] = (link.get("finding") ?? "").split(" ");
  const finding = page.findings.findIndex((f) => f.rule === rule && f.first_step === Number(first) && (f.tensor === null ? "" : names[f.tensor]) === name.join(" "));
  if (finding >= 0) state.finding = finding;
  const [key, order] = (link.get("sort") ?? "").split(" ");
  state.sort = fieldsOf(kind).some(([id]) => id === key) ? { key, down: order !== "up" } : { key: "score", down: true };
  $("search").value = state.query;
  return redraw();
}
let saved = "";
function save() {
  const fragment = encoded();
  if (fragment === saved && fragment === location.hash.slice(1)) return;
  saved = fragment;
  history.replaceState(null, "", fragment ? `#${fragment}` : location.pathname);
}

// Asks the server for the data of a run that has grown, and draws them with the same selection.
async function follow() {
  const { live } = data;
  if (!document.hidden && !state.drag) {
    try {
      const answer = await fetch(`data?have=${live.version}`, { cache: "no-store" });
      if (answer.status === 200) await receive(await answer.json());
      else if (answer.status !== 204) throw new Error(await answer.text());
      $("live").textContent = "● live";
    } catch (error) {
      $("live").textContent = `◌ not live: ${error instanceof TypeError ? "the server has ended" : cut(error.message, 200)}`;
    }
  }
  setTimeout(follow, 1000 * live.seconds);
}
async function receive({ values, matrices }) {
  const before = data.runs[0], now = values.runs[0];
  if (before.range === null || JSON.stringify([before.rows, before.kinds]) !== JSON.stringify([now.rows, now.kinds])) return location.reload();
  const kept = encoded();
  Object.assign(data, values);
  received = matrices;
  decoded.clear();
  await restore(kept);
}
