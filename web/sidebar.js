// The pack's side panel, settings, commands and notes. The server says what happens; nothing here looks into graphs.

import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";
import { makePanel } from "./panel.js";
import { bytes, loadTexts, say } from "./texts.js";

const ADDRESS = "/phase_offload";
const REFRESH_MS = 5000;
const TYPING_MS = 700;
const KEPT_RUNS = 20;
const PRESETS = [
  "plain",
  "one_shot_fast",
  "warm_process",
  "low_ram_safe",
  "wsl_compat",
  "least_device_memory",
  "shared_desktop",
  "larger_than_ram",
];

let panel = null; // while it is open
let runs = []; // the newest first
let unsent = {}; // settings that changed and the server doesn't know yet
let sending = 0;

app.registerExtension({
  name: "phaseoffload.sidebar",

  settings: [
    setting("preset", "Preset", "Preset", "combo", "plain", "Numbers for a kind of machine. plain: the defaults.", {
      options: PRESETS,
    }),
    setting("device_memory", "DeviceMemory", "Device memory", "text", "auto", budgetHelp("device_memory")),
    setting("host_memory", "HostMemory", "Host memory", "text", "auto", budgetHelp("host_memory")),
    setting("warm", "Warm", "Keep weights in RAM between prompts", "boolean", false,
      "Copies in RAM are the first to go when something else needs the room."),
    setting("prompt_cache", "PromptCache", "Keep encoded prompts on disk", "boolean", false,
      "A prompt that was encoded before needs no text encoder, also after a restart."),
    setting("downloads", "Downloads", "Download Model may download", "boolean", false,
      "Off, because a graph that was shared could start a download of many GB."),
  ],

  commands: [
    { id: "PhaseOffload.Purge", label: "Phase Offload: purge", icon: "pi pi-eraser", function: purge },
    { id: "PhaseOffload.CopyReport", label: "Phase Offload: copy report", icon: "pi pi-copy", function: copyReport },
  ],

  async setup() {
    await loadTexts();
    api.addEventListener("phase_offload.event", ({ detail }) => follow(detail));
    app.extensionManager.registerSidebarTab({
      id: "phaseOffload",
      icon: "pi pi-chart-bar",
      title: "Phase Offload",
      tooltip: "Phase Offload",
      type: "custom",
      render: openPanel,
    });
  },
});

function setting(field, name, label, type, defaultValue, tooltip, more = {}) {
  return {
    id: `PhaseOffload.${name}`,
    category: ["Phase Offload", "Defaults", name],
    name: label,
    type,
    defaultValue,
    tooltip,
    ...more,
    onChange: (value) => sendSoon(field, value),
  };
}

function budgetHelp(field) {
  return `What auto in a Load node's ${field} stands for: auto, a size (6GiB), a share (60%), or leave 2GiB.`;
}

// Also called for each setting when the page opens, so that the server learns what this person's browser keeps.
function sendSoon(field, value) {
  unsent[field] = value;
  clearTimeout(sending);
  sending = setTimeout(async () => {
    const values = Object.entries(unsent);
    unsent = {};
    for (const [name, each] of values) await post("/settings", { [name]: each }, say("setting_refused"));
  }, TYPING_MS);
}

function openPanel(element) {
  panel = makePanel(element, { purge, copyReport });
  panel.showRuns(runs);
  refresh();
  const timer = setInterval(() => {
    if (element.isConnected) return refreshMachine();
    clearInterval(timer);
    return undefined;
  }, REFRESH_MS);
}

async function refresh() {
  const history = await get("/history");
  if (history) {
    runs = history.runs;
    panel?.showRuns(runs);
  }
  await refreshMachine();
}

async function refreshMachine() {
  const state = await get("/state");
  if (state) panel?.showMachine(state);
}

// An event of a run: all but its samples, of which only the new one comes.
function follow({ kind, run }) {
  const known = runs.find((each) => each.id === run.id);
  const samples = [...(known?.samples ?? []), ...(run.samples ?? [])];
  const current = { ...run, samples };
  runs = [current, ...runs.filter((each) => each.id !== run.id)].slice(0, KEPT_RUNS);
  if (known && runs.length) panel?.showNewest(current);
  else panel?.showRuns(runs);
  if (kind === "retry") toast("warn", say("retry"), say("retry_detail"));
  if (kind === "refused") toast("error", say("refused"), run.phases.at(-1).error);
}

async function purge() {
  const done = await post("/purge", {}, say("purge"));
  if (!done) return;
  const kept = done.warm_bytes ? say("warm_dropped", { bytes: bytes(done.warm_bytes) }) : "";
  toast("info", say("purge"), [say("purge_asked"), kept].filter(Boolean).join(" "));
  await refreshMachine();
}

async function copyReport() {
  const report = await get("/report");
  if (!report) return;
  if (!navigator.clipboard) {
    // It is there for pages of this machine and over https only.
    panel?.showReport(report.text);
    return;
  }
  await navigator.clipboard.writeText(report.text);
  toast("success", say("copy_report"), say("copied"));
}

async function get(path) {
  const answer = await api.fetchApi(ADDRESS + path, { cache: "no-store" });
  return answer.ok ? answer.json() : null;
}

// The answer to a JSON body, or null after a note that says what is wrong.
async function post(path, body, title) {
  const headers = { "Content-Type": "application/json" };
  const answer = await api.fetchApi(ADDRESS + path, { method: "POST", headers, body: JSON.stringify(body) });
  const said = await answer.json().catch(() => ({}));
  if (answer.ok) return said;
  toast("error", title, said.error ?? String(answer.status));
  return null;
}

function toast(severity, summary, detail) {
  app.extensionManager.toast.add({ severity, summary, detail, life: severity === "error" ? 12000 : 6000 });
}
