// Memory over time of one run, as an SVG: what the process and its phases hold, and the peak that each plan foretold.

import { bytes, say, seconds } from "./texts.js";

const SVG = "http://www.w3.org/2000/svg";
const [WIDTH, HEIGHT, TOP] = [320, 130, 14];
const RAM = 3;
// Columns of a sample are: seconds, bytes on the device, bytes reserved there by the phase, bytes of RAM. Of the last only
// what is above its lowest is drawn: libraries that lie there all the time would make everything else too small to see.
const LINES = [
  { column: RAM, colour: "#4c8dd6", key: "chart_ram" },
  { column: 1, colour: "#57a65b", key: "chart_device" },
  { column: 2, colour: "#e08a3c", key: "chart_reserved" },
];

export function memoryChart(run) {
  const lowest = Math.min(...(run.samples ?? []).map((row) => row[RAM]));
  const rows = (run.samples ?? []).map((row) => row.with(RAM, row[RAM] - lowest));
  const foretold = run.phases.map((phase) => phase.predicted.device_peak_bytes ?? 0);
  const end = Math.max(run.seconds, ...rows.map((row) => row[0]), 0.001);
  const most = Math.max(1, ...foretold, ...rows.flatMap((row) => row.slice(1)));
  const x = (at) => (at / end) * WIDTH;
  const y = (size) => HEIGHT - (size / most) * (HEIGHT - TOP);

  const chart = draw("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT + 14}`, class: "po-chart", role: "img" });
  chart.append(titled(draw("title"), `${bytes(most)}, ${seconds(end)}`));
  run.phases.forEach((phase, index) => {
    const [left, right] = [x(phase.began_s), x(phase.began_s + phase.seconds)];
    const band = { x: left, y: TOP, width: Math.max(right - left, 1), height: HEIGHT - TOP };
    chart.append(draw("rect", { ...band, class: index % 2 ? "po-band po-odd" : "po-band" }));
    chart.append(titled(draw("text", { x: left + 2, y: HEIGHT + 10, class: "po-label" }), say(phase.name)));
    const peak = y(foretold[index]);
    if (foretold[index]) chart.append(draw("line", { x1: left, x2: right, y1: peak, y2: peak, class: "po-foretold" }));
  });
  const shown = LINES.filter(({ column }) => rows.some((row) => row[column]));
  for (const { column, colour } of shown) {
    const points = rows.map((row) => `${x(row[0]).toFixed(1)},${y(row[column]).toFixed(1)}`).join(" ");
    chart.append(draw("polyline", { points, fill: "none", stroke: colour, "stroke-width": 1.5 }));
  }
  chart.append(titled(draw("text", { x: 0, y: 10, class: "po-label" }), bytes(most)));
  chart.append(titled(draw("text", { x: WIDTH, y: 10, class: "po-label", "text-anchor": "end" }), seconds(end)));

  const figure = document.createElement("figure");
  figure.className = "po-figure";
  figure.append(chart, legend([...shown, { colour: "currentColor", key: "chart_foretold", dashed: true }]));
  return figure;
}

function legend(lines) {
  const caption = document.createElement("figcaption");
  for (const { colour, key, dashed } of lines) {
    const entry = document.createElement("span");
    entry.style.borderBottom = `2px ${dashed ? "dashed" : "solid"} ${colour}`;
    entry.textContent = say(key);
    caption.append(entry, " ");
  }
  return caption;
}

function draw(name, attributes = {}) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}

function titled(element, text) {
  element.textContent = text;
  return element;
}
