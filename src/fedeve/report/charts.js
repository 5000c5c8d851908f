// Curves: one panel a section, its charts drawn by plotly when they come into view.

const DRIFTS = ["fact:period_drift", "fact:client_drift"];
const BOTH = "both drifts";
const printing = window.matchMedia("print");
const panels = [];
let arriving = null;

/** Plotly is large: it is unpacked once the tables are there. The policy lets this script run by its checksum. */
function plotting() {
  arriving ??= unpacked("plotly").then((text) => {
    const script = make("script");
    script.textContent = text;
    document.head.append(script);
    document.documentElement.dataset.plotly = "";
  });
  return arriving;
}

/** Plotly reads tags in texts; names come from files, so none is let through. */
const plain = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const faded = (colour, alpha) => colour + Math.round(255 * alpha).toString(16).padStart(2, "0");
const isDark = () => getComputedStyle(document.documentElement).colorScheme === "dark";

/** How a line is drawn: the chosen row, FedEve, in a colour of its own, the others in turn. */
function style(panel, line) {
  const [own, ...colours] = data.palette[isDark() ? "dark" : "light"];
  const chosen = panel.view[0] === "column" ? panel.section.chosen : null;
  if (line === chosen) return { colour: own, dash: "solid", width: 3.2 };
  const place = chosen !== null && line > chosen ? line - 1 : line;
  return { colour: colours[place % colours.length], dash: data.palette.dashes[place % data.palette.dashes.length], width: 2 };
}

/** A running mean over `width` points around each; gaps stay gaps. */
function smoothed(values, width) {
  if (width <= 1) return values;
  const half = (width - 1) / 2;
  return values.map((value, place) => {
    if (value === null) return null;
    const near = values.slice(Math.max(0, place - half), place + half + 1).filter((each) => each !== null);
    return mean(near);
  });
}

/** Seeds at every round they have: mean, deviation, worst and best. */
function gathered(section, runs, quantity, width) {
  const at = new Map();
  for (const run of runs) {
    const [grid, values] = run.curves[quantity.name];
    const shown = smoothed(values, width);
    section.grids[grid].forEach((round, place) => {
      if (shown[place] === null) return;
      if (!at.has(round)) at.set(round, []);
      at.get(round).push(shown[place] * quantity.factor);
    });
  }
  return [...at.keys()].sort((a, b) => a - b).map((round) => {
    const values = at.get(round);
    const middle = mean(values);
    const spread = values.length > 1 ? Math.sqrt(values.reduce((sum, value) => sum + (value - middle) ** 2, 0) / (values.length - 1)) : 0;
    return { round, middle, spread, low: Math.min(...values), high: Math.max(...values), count: values.length };
  });
}

/** The runs behind a line: those that are done, or, where none is, those under way. */
function runsOf(section, view, line, quantity) {
  const [kind, number] = view;
  const here = section.runs.filter((run) => run.curves[quantity.name] && run.state !== "repeat"
    && (kind === "column" ? run.column === number && run.row === line : run.row === number && run.column === line));
  const done = here.filter((run) => run.state === "done");
  return done.length ? done : here;
}

function bandOf(points, kind, logarithmic) {
  if (kind === "none" || kind === "seeds" || !points.some((point) => point.count > 1)) return null;
  const low = (p) => (kind === "range" ? p.low : logarithmic && p.middle - p.spread <= 0 ? p.low : p.middle - p.spread);
  const high = (p) => (kind === "range" ? p.high : p.middle + p.spread);
  const back = [...points].reverse();
  return { x: [...points, ...back].map((p) => p.round), y: [...points.map(high), ...back.map(low)] };
}

/** Plotly's traces of one line: a band or single seeds, and the mean. */
function tracesOf(panel, chart, line, quantity, look) {
  const name = panel.names[line];
  const { section, view } = panel;
  const runs = runsOf(section, view, line, quantity);
  if (!runs.length) return [];
  const width = Number(panel.smooth.value);
  const points = gathered(section, runs, quantity, width);
  if (!points.length) return [];
  const unfinished = runs.some((run) => run.state !== "done") ? " (unfinished)" : "";
  const visible = panel.hidden.has(line) ? "legendonly" : true;
  const common = { type: "scatter", mode: "lines", legendgroup: name, meta: line, visible };
  const found = [];
  const kind = panel.band.value;
  const band = bandOf(points, kind, chart.logY.checked);
  if (band) found.push({ ...common, ...band, fill: "toself", fillcolor: faded(look.colour, 0.16), line: { width: 0 }, hoverinfo: "skip", showlegend: false });
  if (kind === "seeds") {
    for (const run of runs) {
      const each = gathered(section, [run], quantity, width);
      found.push({ ...common, x: each.map((p) => p.round), y: each.map((p) => p.middle), name: plain(`${name}, seed ${run.seed}`),
        line: { color: faded(look.colour, 0.45), dash: look.dash, width: 1 }, hoverinfo: "skip", showlegend: false });
    }
  }
  const digits = quantity.digits ? `.${quantity.digits}f` : ".3g";
  found.push({ ...common, x: points.map((p) => p.round), y: points.map((p) => p.middle), name: plain(name + unfinished),
    mode: points.length > 1 ? "lines" : "markers",
    line: { color: look.colour, dash: look.dash, width: look.width }, showlegend: look.legend, marker: { color: look.colour },
    customdata: points.map((p) => (p.count > 1 ? ` (${number(p.low, quantity)} to ${number(p.high, quantity)}, ${p.count} seeds)` : "")),
    hovertemplate: `%{fullData.name}${look.suffix} <b>%{y:${digits}}</b>%{customdata}<extra></extra>` });
  return found;
}

const number = (value, quantity) => (quantity.digits ? value.toFixed(quantity.digits) : value.toPrecision(3));

function allTraces(panel, chart) {
  const { section } = panel;
  const both = chart.quantity.value === BOTH;
  const chosen = section.quantities.filter((each) => (both ? DRIFTS.includes(each.name) : each.name === chart.quantity.value));
  return panel.names.flatMap((_, line) => chosen.flatMap((quantity, place) => {
    const look = { ...style(panel, line), legend: true, suffix: "" };
    // With two drifts in one chart the dash tells them apart, the colour still tells the line.
    if (both) Object.assign(look, { dash: ["solid", "dot"][place], legend: place === 0, suffix: [", period", ", client"][place] });
    return tracesOf(panel, chart, line, quantity, look);
  }));
}

function layoutOf(panel, chart) {
  const [ink, soft, line, paper] = ["--ink", "--soft", "--line", "--paper"].map(css);
  const both = chart.quantity.value === BOTH;
  const title = both ? "drift (dotted: client)" : panel.section.quantities.find((each) => each.name === chart.quantity.value).title;
  // Plotly writes the digit alone between powers of ten; here every label of a logarithmic axis is a whole number.
  const small = both || chart.quantity.value.startsWith("fact:");
  const scale = (box) => (box.checked ? { type: "log", dtick: "D2", ...(small ? { tickformat: "~e" } : {}) } : { type: "linear" });
  const few = Math.max(0, ...panel.section.grids.map((grid) => grid.at(-1) ?? 0)) <= 12; // there is no round 2.5
  const axis = { gridcolor: line, zerolinecolor: line, linecolor: line, automargin: true, exponentformat: "power", showspikes: false };
  return {
    font: { color: ink, size: 13, family: "system-ui, -apple-system, Segoe UI, Roboto, DejaVu Sans, sans-serif" },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    margin: { l: 58, r: 12, t: 8, b: 44 },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: soft, activecolor: ink },
    hovermode: "x unified", hoverdistance: -1, hoverlabel: { bgcolor: paper, bordercolor: soft, font: { color: ink, size: 12 }, namelength: -1 },
    legend: { orientation: "h", y: -0.17, yanchor: "top", x: 0, font: { size: 12 } }, showlegend: true,
    xaxis: { ...axis, unifiedhovertitle: { text: "round %{x}" }, title: { text: "round", standoff: 6, font: { size: 13 } }, type: chart.logX.checked ? "log" : "linear",
      ...(few && !chart.logX.checked ? { dtick: 1 } : {}) },
    yaxis: { ...axis, title: { text: plain(title), standoff: 8, font: { size: 13 } }, ...scale(chart.logY) },
    uirevision: `${chart.quantity.value} ${chart.logX.checked} ${chart.logY.checked} ${panel.choice.value}`,
    ...(printing.matches ? { width: 660, height: 330 } : {}),
  };
}

function draw(panel, chart) {
  if (!window.Plotly) {
    plotting().then(() => draw(panel, chart));
    return;
  }
  const first = !chart.drawn;
  chart.drawn = true;
  const name = slug(`${panel.section.title} ${chart.quantity.value}`);
  // A list of our own, since plotly's holds a button that sends the chart to a server.
  const config = { responsive: true, displaylogo: false, modeBarButtons: [["toImage", "zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]],
    toImageButtonOptions: { format: "svg", filename: name } };
  const traces = allTraces(panel, chart);
  chart.plot.setAttribute("aria-label", `${chart.quantity.selectedOptions[0].textContent} over rounds, ${traces.filter((t) => t.customdata).length} lines`);
  Plotly.react(chart.plot, traces, layoutOf(panel, chart), config);
  if (!first) return;
  chart.plot.on("plotly_legendclick", (event) => {
    toggle(panel, event.data[event.curveNumber].meta);
    return false;
  });
  chart.plot.on("plotly_legenddoubleclick", (event) => {
    const line = event.data[event.curveNumber].meta;
    const alone = panel.names.every((_, each) => each === line || panel.hidden.has(each));
    panel.hidden = new Set(alone ? [] : panel.names.map((_, each) => each).filter((each) => each !== line));
    refresh(panel);
    return false;
  });
  chart.plot.on("plotly_click", (event) => {
    const line = event.points[0].data.meta;
    const quantity = panel.section.quantities.find((each) => each.name === chart.quantity.value || (chart.quantity.value === BOTH && each.name === DRIFTS[0]));
    const other = panel.view[0] === "column" ? panel.section.columns[panel.view[1]] : panel.section.rows[panel.view[1]];
    trace(panel.section, runsOf(panel.section, panel.view, line, quantity), `${panel.names[line]}, ${other}`);
  });
}

function toggle(panel, line) {
  if (!panel.hidden.delete(line)) panel.hidden.add(line);
  refresh(panel);
}

function refresh(panel) {
  panel.lines.querySelectorAll("input").forEach((box) => (box.checked = !panel.hidden.has(Number(box.value))));
  for (const chart of panel.charts) if (chart.drawn) draw(panel, chart);
}

/** The boxes that show and hide lines: what the legends do, for the keyboard too. */
function fillLines(panel) {
  const dashes = { solid: "", dash: "7 4", dot: "2 3", dashdot: "7 3 2 3", longdash: "11 4" };
  const swatch = (line) => {
    const { colour, dash } = style(panel, line);
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    const stroke = document.createElementNS("http://www.w3.org/2000/svg", "line");
    Object.entries({ width: 30, height: 8, "aria-hidden": "true" }).forEach(([key, value]) => svg.setAttribute(key, value));
    Object.entries({ x1: 0, x2: 30, y1: 4, y2: 4, stroke: colour, "stroke-width": 2.5, "stroke-dasharray": dashes[dash] })
      .forEach(([key, value]) => stroke.setAttribute(key, value));
    svg.append(stroke);
    return svg;
  };
  panel.lines.replaceChildren(make("legend", {}, panel.view[0] === "column" ? "Methods" : "Columns"),
    ...panel.names.map((name, line) => make("label", {},
      make("input", { type: "checkbox", value: line, checked: !panel.hidden.has(line), onchange: () => toggle(panel, line) }), swatch(line), name)));
}

function choose(panel) {
  const [kind, place] = panel.choice.value.split(":");
  panel.view = [kind, Number(place)];
  panel.names = kind === "column" ? panel.section.rows : panel.section.columns;
  panel.hidden = new Set();
  panel.root.querySelector("h3").textContent = `Curves: ${panel.choice.selectedOptions[0].parentElement.label} ${panel.choice.selectedOptions[0].textContent}`;
  fillLines(panel);
  refresh(panel);
}

/** The curves of a chart as they are drawn, smoothing included. */
function curvesCsv(chart) {
  const quote = (text) => `"${String(text).replaceAll('"', '""')}"`;
  const lines = chart.plot.data.filter((each) => each.customdata && each.visible === true).flatMap((each) => {
    const drift = chart.quantity.value === BOTH ? (each.line.dash === "dot" ? ", client" : ", period") : "";
    return [...each.x].map((x, place) => [quote(unescaped(each.name) + drift), x, each.y[place]].join(","));
  });
  return ["line,round,value", ...lines].join("\n") + "\n";
}
const unescaped = (text) => text.replaceAll("&lt;", "<").replaceAll("&gt;", ">").replaceAll("&amp;", "&");

function addChart(panel, quantity) {
  const options = panel.section.quantities.map((each) => make("option", { value: each.name }, each.title));
  if (panel.drifts) options.push(make("option", { value: BOTH }, BOTH));
  const chart = { plot: make("div", { class: "plot", role: "img" }), quantity: make("select", { class: "quantity" }, ...options) };
  chart.quantity.value = quantity;
  chart.logY = make("input", { type: "checkbox", class: "log-y", checked: quantity === BOTH });
  chart.logX = make("input", { type: "checkbox", class: "log-x" });
  const again = () => draw(panel, chart);
  chart.quantity.addEventListener("change", () => {
    chart.logY.checked = chart.quantity.value === BOTH || DRIFTS.includes(chart.quantity.value);
    again();
  });
  for (const box of [chart.logX, chart.logY]) box.addEventListener("change", again);
  const save = () => download(`${slug(`${panel.section.title} ${chart.quantity.value}`)}.csv`, curvesCsv(chart), "text/csv");
  panel.root.querySelector(".charts").append(make("figure", { class: "chart" },
    make("div", { class: "controls" }, make("label", {}, "Quantity ", chart.quantity), make("label", {}, chart.logY, " log y"),
      make("label", {}, chart.logX, " log x"), make("button", { type: "button", class: "save-curves", onclick: save }, "CSV")), chart.plot));
  panel.charts.push(chart);
}

function build(root) {
  const section = sectionOf(root);
  const names = section.quantities.map((each) => each.name);
  const panel = { root, section, charts: [], hidden: new Set(), drifts: DRIFTS.every((name) => names.includes(name)) };
  for (const part of ["choice", "smooth", "band", "lines"]) panel[part] = root.querySelector(`.${part}`);
  const options = (kind, list) => list.map((name, place) => make("option", { value: `${kind}:${place}` }, name));
  const some = (kind, place) => section.runs.some((run) => run[kind] === place && Object.keys(run.curves).length);
  panel.choice.append(make("optgroup", { label: "all methods in" }, ...options("column", section.columns)),
    make("optgroup", { label: "all columns of" }, ...options("row", section.rows)));
  panel.choice.value = `column:${Math.max(0, section.columns.findIndex((_, place) => some("column", place)))}`;
  const metrics = section.quantities.filter((each) => !each.name.startsWith("fact:")).map((each) => each.name);
  const wanted = new Set([metrics[0], metrics.includes("loss") ? "loss" : metrics[1], names.includes("fact:gain") ? "fact:gain" : undefined, panel.drifts ? BOTH : undefined]);
  wanted.delete(undefined);
  for (const quantity of wanted.size ? wanted : names.slice(0, 1)) addChart(panel, quantity);
  panel.choice.addEventListener("change", () => choose(panel));
  panel.band.addEventListener("change", () => refresh(panel));
  panel.smooth.addEventListener("input", () => {
    root.querySelector("output").textContent = panel.smooth.value === "1" ? "off" : `${panel.smooth.value} points`;
    refresh(panel);
  });
  choose(panel);
  panels.push(panel);
}

const watcher = new IntersectionObserver((seen) => {
  for (const each of seen.filter((one) => one.isIntersecting)) {
    watcher.unobserve(each.target);
    const panel = panels.find((one) => one.charts.some((chart) => chart.plot === each.target));
    const chart = panel.charts.find((one) => one.plot === each.target);
    if (!chart.drawn) draw(panel, chart);
  }
}, { rootMargin: "200px" });

for (const root of document.querySelectorAll(".curves")) build(root);
for (const panel of panels) for (const chart of panel.charts) watcher.observe(chart.plot);

function redrawAll(also) {
  panels.forEach(fillLines);
  for (const panel of panels) for (const chart of panel.charts) if (chart.drawn || also) draw(panel, chart);
}
document.addEventListener("recolour", () => redrawAll(false));
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => redrawAll(false));
printing.addEventListener("change", () => redrawAll(printing.matches));
document.documentElement.dataset.ready = "";
setTimeout(plotting, 100); // so that it is there when somebody prints
