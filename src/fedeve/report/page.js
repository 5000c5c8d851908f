// The page's behaviour apart from curves: colours, sorting, tracing, exports, rounds to reach a value.

/** The text packed into an element: gzip in base64. */
function unpacked(id) {
  const bytes = Uint8Array.from(atob(document.getElementById(id).textContent), (sign) => sign.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
}

const data = JSON.parse(await unpacked("data"));

/** An element with attributes and children; texts are texts, never markup. */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

function download(name, text, type = "text/plain") {
  const address = URL.createObjectURL(new Blob([text], { type: `${type};charset=utf-8` }));
  const link = make("a", { href: address, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}

const sectionOf = (element) => data.sections[Number(element.closest("section[data-section]").dataset.section)];
const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
const grouped = (number) => Math.round(number).toLocaleString("en-GB");
const slug = (text) => text.toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-|-$/g, "").slice(0, 60) || "table";

// ---- colours ----
const theme = document.getElementById("theme");
theme.addEventListener("change", () => {
  if (theme.value) document.documentElement.dataset.theme = theme.value;
  else delete document.documentElement.dataset.theme;
  document.dispatchEvent(new Event("recolour"));
});
document.getElementById("print").addEventListener("click", () => window.print());

// ---- sorting ----
function sortBy(button) {
  const head = button.closest("th");
  const table = head.closest("table");
  const place = [...head.parentElement.children].indexOf(head);
  const first = head.dataset.first || "descending";
  const other = first === "descending" ? "ascending" : "descending";
  const direction = head.getAttribute("aria-sort") === first ? other : first;
  for (const each of head.parentElement.children) each.setAttribute("aria-sort", "none");
  head.setAttribute("aria-sort", direction);
  const key = (row) => row.children[place].dataset.sort ?? row.children[place].textContent.trim();
  const rows = [...table.tBodies[0].rows].map((row) => [key(row), row]);
  const numeric = rows.every(([value]) => value === "" || Number.isFinite(Number(value)));
  const sign = direction === "ascending" ? 1 : -1;
  rows.sort(([a], [b]) => {
    if (a === "" || b === "") return (a === "") - (b === ""); // what has no value stays below
    return sign * (numeric ? Number(a) - Number(b) : a.localeCompare(b, "en", { numeric: true }));
  });
  table.tBodies[0].append(...rows.map(([, row]) => row));
}

// ---- tracing ----
const dialog = document.getElementById("trace");
document.getElementById("trace-close").addEventListener("click", () => dialog.close());
dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());

function pairs(table) {
  const list = make("dl");
  for (const [name, value] of Object.entries(table)) {
    if (value !== "" && value !== null && value !== undefined) list.append(make("dt", {}, name), make("dd", {}, String(value)));
  }
  return list;
}

function described(section, run) {
  const { header, timing } = run;
  const finals = {};
  for (const metric of section.metrics) {
    const value = run.final[metric.name];
    if (value !== undefined && value !== null) finals[metric.title] = (value * metric.factor).toFixed(metric.digits);
  }
  const versions = Object.entries(header.versions || {}).map(([name, version]) => `${name} ${version}`).join(", ");
  const facts = pairs({
    run: `${section.rows[run.row]}, ${section.columns[run.column]}`,
    state: run.state + (run.reason ? `: ${run.reason}` : ""),
    seed: run.seed,
    record: run.record,
    rounds: run.rounds,
    ...finals,
    "time, s": timing.seconds?.toFixed(1),
    "client-steps": timing.client_steps === undefined ? "" : grouped(timing.client_steps),
    "examples trained": timing.examples === undefined ? "" : grouped(timing.examples),
    "rounds lost": run.lost || "",
    "rounds with updates left out": run.left_out || "",
    versions,
    engine: header.engine && `${header.engine} on ${header.device}`,
    "data fingerprint": header.data?.fingerprint,
    identity: header.identity,
  });
  const config = JSON.stringify(header.config, null, 1);
  const name = `run-${slug(section.rows[run.row])}-${run.seed}.json`;
  return make("details", { open: section.opened === run },
    make("summary", {}, `seed ${run.seed}: ${run.state}${section.several ? `, ${section.rows[run.row]}` : ""}`), facts,
    make("p", { class: "soft" }, `Configuration; saved as a file, fedeve run ${name} --out FOLDER runs it again. `,
      make("button", { type: "button", onclick: () => download(name, config, "application/json") }, "Save")),
    make("pre", {}, config));
}

function trace(section, runs, title) {
  document.getElementById("trace-title").textContent = title;
  section.opened = runs[0];
  section.several = new Set(runs.map((run) => run.row)).size > 1;
  document.getElementById("trace-body").replaceChildren(
    ...(runs.length ? runs.map((run) => described(section, run)) : [make("p", {}, "No run was planned here.")]));
  if (!dialog.open) dialog.showModal();
}

// ---- exports ----
const TYPES = { csv: "text/csv", md: "text/markdown", tex: "application/x-tex" };

document.addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (!button) return;
  if (button.classList.contains("sort")) sortBy(button);
  else if (button.dataset.runs !== undefined) {
    const section = sectionOf(button);
    const runs = button.dataset.runs.split(" ").filter(Boolean).map((number) => section.runs[Number(number)]);
    trace(section, runs, button.dataset.title);
  } else if (button.dataset.export) {
    const section = sectionOf(button);
    const table = section.tables[Number(button.dataset.table)];
    const kind = button.dataset.export;
    download(`${slug(`${section.title} ${table.title}`)}.${kind}`, table.exports[kind], TYPES[kind]);
  }
});

// ---- the list of runs ----
for (const search of document.querySelectorAll("input[type=search]")) {
  search.addEventListener("input", () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const row of search.closest("details").querySelector("tbody").rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
    }
  });
}

// ---- rounds to reach a value ----
/** The first evaluation of a run that reached a value: its round and the clients that had answered; null if none. */
function reached(run, metric, goal) {
  const highs = run.highs[metric.name];
  if (!highs) return null;
  const place = highs[1].findIndex((value) => (metric.lower ? value * metric.factor <= goal : value * metric.factor >= goal));
  return place < 0 ? null : { round: highs[0][place], examples: highs[2][place] * (run.examples_per_client ?? NaN) };
}

function reachCell(section, metric, goal, row, column) {
  const runs = section.runs.filter((run) => run.row === row && run.column === column && run.state === "done");
  if (!runs.length) return make("td", { class: "none", "data-sort": "" }, "not run");
  const found = runs.map((run) => reached(run, metric, goal)).filter(Boolean);
  if (!found.length) return make("td", { class: "none", "data-sort": "" }, "not reached");
  const rounds = mean(found.map((each) => each.round));
  const examples = mean(found.map((each) => each.examples));
  const some = found.length < runs.length ? ` (${found.length} of ${runs.length} seeds)` : "";
  const places = runs.map((run) => section.runs.indexOf(run)).join(" ");
  const title = `${section.rows[row]}, ${section.columns[column]}: rounds to ${goal}`;
  return make("td", { "data-sort": found.length < runs.length ? "" : rounds },
    make("button", { type: "button", class: "value", "data-runs": places, "data-title": title }, `${grouped(rounds)} rounds${some}`),
    Number.isFinite(examples) ? make("div", { class: "beside" }, `≈ ${grouped(Number(examples.toPrecision(3)))} examples`) : null);
}

function fillReach(block) {
  const section = sectionOf(block);
  const metric = section.metrics[Number(block.querySelector("select").value)];
  const goal = block.querySelector("input").valueAsNumber;
  const sortable = (title) => make("th", { scope: "col", "aria-sort": "none", "data-first": "ascending" }, make("button", { type: "button", class: "sort" }, title));
  const body = section.rows.map((row, r) => make("tr", {}, make("th", { scope: "row" }, row),
    ...section.columns.map((_, c) => reachCell(section, metric, goal, r, c))));
  block.querySelector(".note").textContent =
    `First evaluation with ${metric.title} at ${goal} or ${metric.lower ? "below" : "above"}; mean over the seeds that got there.`;
  block.querySelector(".scroll").replaceChildren(make("table", {}, make("thead", {}, make("tr", {}, ...["method", ...section.columns].map(sortable))), make("tbody", {}, ...body)));
}

/** A goal to begin with: what the weaker half of the cells reach. */
function middling(section, metric) {
  const finals = section.runs.map((run) => run.final[metric.name]).filter((value) => Number.isFinite(value)).sort((a, b) => a - b);
  return finals.length ? finals[Math.floor(finals.length / 2)] * metric.factor : 0;
}

for (const block of document.querySelectorAll(".reach")) {
  const section = sectionOf(block);
  const [choice, goal] = [block.querySelector("select"), block.querySelector("input")];
  choice.append(...section.metrics.map((metric, n) => make("option", { value: n }, metric.title)));
  const begin = () => {
    const metric = section.metrics[Number(choice.value)];
    goal.value = middling(section, metric).toFixed(metric.factor === 100 ? 0 : 2);
    fillReach(block);
  };
  choice.addEventListener("change", begin);
  goal.addEventListener("input", () => Number.isFinite(goal.valueAsNumber) && fillReach(block));
  begin();
}
