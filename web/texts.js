// What the pack's page says, in the person's language: from locales/<language>/main.json, English where a text is missing.

import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";

const FALLBACK = "en";
let texts = {};

export async function loadTexts() {
  const answer = await api.fetchApi("/i18n");
  const all = answer.ok ? await answer.json() : {};
  const language = app.extensionManager.setting.get("Comfy.Locale") ?? FALLBACK;
  texts = { ...all[FALLBACK]?.phaseOffload, ...all[language]?.phaseOffload };
}

// The text of a key, with {name} replaced by values.name. A key without a text is its own text.
export function say(key, values = {}) {
  return (texts[key] ?? key).replace(/\{(\w+)\}/g, (whole, name) => String(values[name] ?? whole));
}

export function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let [value, unit] = [count ?? 0, 0];
  while (value >= 1023.95 && unit < units.length - 1) [value, unit] = [value / 1024, unit + 1];
  return unit ? `${value.toFixed(1)} ${units[unit]}` : `${value} B`;
}

export function seconds(count) {
  if (count < 10) return `${count.toFixed(1)} s`;
  if (count < 120) return `${Math.round(count)} s`;
  const whole = Math.round(count);
  return `${Math.floor(whole / 60)}:${String(whole % 60).padStart(2, "0")} min`;
}
