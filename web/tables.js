// Shows the table of Plan Preview and of Phase Report on the node. ComfyUI draws the pictures of a node by itself, but not its texts.

import { app } from "../../scripts/app.js";

const NODES = ["PhaseOffloadPlanPreview", "PhaseOffloadReport"];
const WIDGET = "table";
const TYPE = "PHASE_OFFLOAD_TABLE"; // none that the page has a widget of its own for
const TABLE_WIDTH = 700; // of 110 letters
const CHART_SHAPE = 0.46; // its height for its width, with its caption
const STYLE =
  "margin:0; padding:4px 6px; box-sizing:border-box; overflow:auto; white-space:pre; user-select:text;" +
  "font:10px/1.35 'DejaVu Sans Mono', Consolas, Menlo, monospace;" +
  "color:var(--input-text, #ddd); background:var(--comfy-input-bg, #222); border-radius:4px;";

app.registerExtension({
  name: "phaseoffload.tables",

  beforeRegisterNodeDef(nodeType, nodeData) {
    if (!NODES.includes(nodeData.name)) return;
    const onExecuted = nodeType.prototype.onExecuted;
    nodeType.prototype.onExecuted = function (output) {
      onExecuted?.apply(this, arguments);
      showTable(this, output?.text);
    };
  },

  // When a workflow that ran before is opened again. Only newer pages call it.
  onNodeOutputsUpdated(outputs) {
    for (const node of app.graph.nodes) {
      if (NODES.includes(node.type)) showTable(node, outputs[node.id]?.text);
    }
  },
});

function showTable(node, text) {
  if (!text) return;
  const table = Array.isArray(text) ? text.join("\n") : String(text);
  const widget = node.widgets?.find((each) => each.name === WIDGET) ?? addTable(node);
  widget.element.textContent = table;
}

function addTable(node) {
  const element = document.createElement("pre");
  element.style.cssText = STYLE;
  const widget = node.addDOMWidget(WIDGET, TYPE, element, { serialize: false, getMinHeight: () => 190 });
  widget.serialize = false; // it is no setting of the node: a saved workflow doesn't hold it
  const [least, height] = node.computeSize();
  const width = Math.max(node.size[0], least, TABLE_WIDTH);
  node.setSize([width, Math.max(node.size[1], height + width * CHART_SHAPE)]);
  return widget;
}
