// Draws the side panel from plain data: the machine, the last run with a bar for each phase, and earlier runs.

import { memoryChart } from "./chart.js";
import { bytes, say, seconds } from "./texts.js";

// Fills `root` and returns the functions that bring its parts up to date.
// actions: purge and copyReport, called without arguments.
export function makePanel(root, actions) {
  const style = document.createElement("style");
  style.textContent = `
    .po-panel { padding: 10px 12px; font-size: 12px; line-height: 1.45; overflow-y: auto; height: 100%;
      box-sizing: border-box; color: var(--fg-color, #ddd); }
    .po-panel h3 { font-size: 13px; margin: 14px 0 4px; font-weight: 600; }
    .po-panel p, .po-panel figure { margin: 2px 0; }
    .po-row { display: flex; justify-content: space-between; gap: 8px; }
    .po-quiet { color: var(--descrip-text, #999); }
    .po-error { color: var(--error-text, #ff6b6b); overflow-wrap: anywhere; }
    .po-buttons { display: flex; gap: 6px; }
    .po-buttons button { flex: 1; padding: 5px 8px; border-radius: 4px; cursor: pointer; font: inherit;
      border: 1px solid var(--border-color, #555); color: inherit; background: var(--comfy-input-bg, #222); }
    .po-bar { position: relative; height: 7px; margin: 2px 0 4px; border-radius: 3px; overflow: hidden;
      background: var(--comfy-input-bg, #222); }
    .po-bar i { position: absolute; inset: 0 auto 0 0; background: #4c8dd6; }
    .po-bar.po-memory i { background: #e08a3c; }
    .po-bar b { position: absolute; top: 0; bottom: 0; width: 2px; background: currentColor; }
    .po-report { user-select: text; overflow-x: auto; font-size: 10px; }
    .po-phase { margin: 6px 0 8px; }
    .po-panel summary { cursor: pointer; }
    .po-chart { width: 100%; height: auto; }
    .po-band { fill: currentColor; opacity: 0.05; } .po-odd { opacity: 0.1; }
    .po-label { font-size: 9px; fill: currentColor; }
    .po-foretold { stroke: currentColor; stroke-dasharray: 4 3; }
    .po-figure figcaption { font-size: 10px; } .po-figure figcaption span { margin-right: 6px; }
  `;
  const [report, machine, last, earlier] = ["report", "machine", "last", "earlier"].map(part);
  const buttons = make("div", "po-buttons");
  buttons.append(button(say("purge"), actions.purge), button(say("copy_report"), actions.copyReport));
  const panel = make("div", "po-panel");
  panel.append(style, buttons, report, machine, last, earlier);
  root.replaceChildren(panel);

  return {
    showReport: (content) => report.replaceChildren(text("pre", content, "po-report")),
    showMachine: (state) => machine.replaceChildren(heading(say("machine")), ...machineRows(state)),
    showRuns: ([newest, ...others]) => {
      last.replaceChildren(...(newest ? runParts(newest) : [text("p", say("nothing_ran"), "po-quiet")]));
      showEarlier(earlier, others);
    },
    showNewest: (run) => last.replaceChildren(...runParts(run)),
  };
}

function machineRows({ machine, warm_bytes: warm }) {
  const rows = [];
  for (const [title, place] of [
    [say("ram"), machine.host],
    [machine.device?.title, machine.device],
  ]) {
    if (!place) continue;
    const sizes = { free: bytes(place.free), total: bytes(place.total) };
    rows.push(row(title, say("free_of", sizes)));
    rows.push(bar((place.total - place.free) / place.total));
    rows.push(text("p", say("taken", { bytes: bytes(place.taken), source: place.source }), "po-quiet"));
  }
  if (machine.pinned_limit) rows.push(row(say("pinned_limit"), bytes(machine.pinned_limit)));
  if (warm) rows.push(row(say("kept_warm"), bytes(warm)));
  return rows;
}

function runParts(run) {
  const title = row(say(run.outcome), `${new Date(run.began * 1000).toLocaleTimeString()}, ${seconds(run.seconds)}`);
  return [heading(say("last_prompt")), title, ...run.phases.map(phaseBlock), memoryChart(run)];
}

function phaseBlock(phase) {
  const block = make("div", "po-phase");
  const { predicted, measured } = phase;
  const going = phase.outcome === "running";
  const took = predicted.seconds
    ? say("seconds_foretold", { seconds: seconds(phase.seconds), foretold: seconds(predicted.seconds) })
    : seconds(phase.seconds);
  block.append(row(say(phase.name), took), bar(going ? share(phase) : phase.outcome === "done" ? 1 : share(phase)));
  if (going) block.append(text("p", progressText(phase), "po-quiet"));
  else if (phase.outcome !== "done") block.append(text("p", say(phase.outcome), "po-quiet"));

  const [held, foretold] = [measured.reserved_peak_bytes ?? phase.held?.device_bytes ?? 0, predicted.device_peak_bytes ?? 0];
  if (held || foretold) {
    const most = Math.max(held, foretold);
    const sizes = { bytes: bytes(held), foretold: bytes(foretold) };
    block.append(bar(held / most, foretold ? foretold / most : undefined, "po-memory"));
    block.append(text("p", say(foretold ? "memory_foretold" : "memory_held", sizes), "po-quiet"));
  }
  if (measured.streamed_bytes) block.append(text("p", say("streamed", { bytes: bytes(measured.streamed_bytes) }), "po-quiet"));
  for (const note of phase.notes) block.append(text("p", note));
  if (phase.error) block.append(text("p", phase.error, "po-error"));
  return block;
}

// How far a phase is: by steps if it has any, else by bytes loaded.
function share({ steps, loaded }) {
  const [done, total] = steps[1] ? steps : loaded;
  return total ? done / total : 0;
}

function progressText({ steps, loaded }) {
  if (steps[1]) return say("step", { done: steps[0], total: steps[1] });
  if (loaded[1]) return say("loading", { done: bytes(loaded[0]), total: bytes(loaded[1]) });
  return say("looking_ahead");
}

// Runs that are opened stay open when the list is drawn anew.
function showEarlier(element, runs) {
  const open = new Set([...element.querySelectorAll("details[open]")].map((each) => each.dataset.run));
  const entries = runs.map((run) => {
    const details = make("details");
    details.dataset.run = run.id;
    details.open = open.has(run.id);
    const names = run.phases.map((phase) => say(phase.name)).join(", ");
    const title = `${new Date(run.began * 1000).toLocaleTimeString()}: ${say(run.outcome)}, ${seconds(run.seconds)}`;
    const fill = () => details.childElementCount < 2 && details.append(...run.phases.map(phaseBlock), memoryChart(run));
    details.append(text("summary", `${title} (${names})`));
    details.addEventListener("toggle", fill);
    if (details.open) fill();
    return details;
  });
  element.replaceChildren(...(entries.length ? [heading(say("earlier_prompts")), ...entries] : []));
}

function bar(part, mark, kind = "") {
  const element = make("div", `po-bar ${kind}`);
  const filled = make("i");
  filled.style.width = `${Math.min(Math.max(part || 0, 0), 1) * 100}%`;
  element.append(filled);
  if (mark !== undefined) {
    const tick = make("b");
    tick.style.left = `calc(${Math.min(mark, 1) * 100}% - 2px)`;
    element.append(tick);
  }
  return element;
}

function row(left, right) {
  const element = make("div", "po-row");
  element.append(text("span", left), text("span", right));
  return element;
}

function button(label, act) {
  const element = text("button", label);
  element.type = "button";
  element.addEventListener("click", act);
  return element;
}

function part(name) {
  const element = make("section");
  element.dataset.part = name;
  return element;
}

function heading(title) {
  return text("h3", title);
}

function text(name, content, kind = "") {
  const element = make(name, kind);
  element.textContent = content;
  return element;
}

function make(name, kind = "") {
  const element = document.createElement(name);
  if (kind) element.className = kind;
  return element;
}
