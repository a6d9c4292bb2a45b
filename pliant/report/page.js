"use strict";
const MIB = 1 << 20;
const $ = (where, what) => where.querySelector(what);
const mib = bytes => (bytes / MIB).toFixed(3) + " MiB";
const chosen = {};  // the size of each dim that its slider shows, by number

function showSize(dim, k) {
  chosen[dim] = k;
  const section = $(document, `section.memory[data-dim="${dim}"]`);
  $(section, "output").textContent = report.sizes[dim][k].size;
  section.querySelectorAll(".frame").forEach((f, i) => { f.hidden = i !== k; });
  showPlan(dim);
}

// What a call does inside a limit: the plan of the largest limit below it.
function planOf(at, limit) {
  if (limit >= at.peak) return { peak: at.peak, chunks: [], recomputed: 0, spilled: 0, seconds: at.seconds };
  if (limit < at.least) return null;
  return at.plans.filter(plan => plan.limit <= limit).pop() || null;
}

function showPlan(dim) {
  const section = $(document, `section.peak[data-dim="${dim}"]`);
  const at = report.sizes[dim][chosen[dim]], limit = Number(section.dataset.limit);
  const plan = planOf(at, limit);
  const words = [`${dim}=${at.size}, limit ${mib(limit)}: `];
  if (plan === null) words.push(`refused, it needs ${mib(at.least)} at least`);
  else {
    words.push(`peak ${mib(plan.peak)} (${plan.peak} bytes), predicted ${(plan.seconds * 1e3).toFixed(3)} ms`);
    if (plan.chunks.length) words.push("; in chunks: " + plan.chunks.join(", "));
    if (plan.recomputed) words.push(`; ${plan.recomputed} values computed again`);
    if (plan.spilled) words.push(`; ${plan.spilled} values written to a file`);
  }
  const text = $(section, ".plan");
  text.textContent = words.join("");
  text.dataset.peak = plan === null ? "" : plan.peak;
}

function addLimit(section) {
  const dim = section.dataset.dim, svg = $(section, "svg"), d = svg.dataset;
  const make = (name, attributes) => {
    const e = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [k, v] of Object.entries(attributes)) e.setAttribute(k, v);
    return svg.appendChild(e);
  };
  const line = make("line", { x1: d.left, x2: d.right, stroke: "#8250df", "stroke-width": 3, "stroke-dasharray": "8 4", class: "limit" });
  const name = make("text", { x: d.right, "text-anchor": "end", fill: "#8250df", "font-weight": "bold" });
  const top = Number(d.top), bottom = Number(d.bottom), up = Number(d.up) * MIB;
  const place = limit => {
    const y = bottom - (bottom - top) * limit / up;
    section.dataset.limit = limit;
    line.setAttribute("y1", y); line.setAttribute("y2", y);
    name.setAttribute("y", y - 6); name.textContent = "limit " + mib(limit);
    showPlan(dim);
  };
  svg.addEventListener("pointerdown", event => { svg.setPointerCapture(event.pointerId); move(event); });
  svg.addEventListener("pointermove", event => { if (event.buttons) move(event); });
  const move = event => {
    const y = event.clientY - svg.getBoundingClientRect().top;
    place(Math.round(Math.min(Math.max((bottom - y) / (bottom - top), 0), 1) * up));
  };
  section.setLimit = place;
  place(report.limit === null ? report.sizes[dim][chosen[dim]].peak : Math.min(report.limit, up));
}

document.querySelectorAll("input.size").forEach(slider => {
  const dim = slider.dataset.dim;
  chosen[dim] = Number(slider.value);
  slider.addEventListener("input", () => showSize(dim, Number(slider.value)));
});
document.querySelectorAll("section.peak").forEach(addLimit);

const tip = document.getElementById("tip");
document.addEventListener("pointermove", event => {
  const number = event.target.dataset && event.target.dataset.number;
  const section = event.target.closest && event.target.closest("section.memory");
  tip.hidden = number === undefined || !section;
  if (tip.hidden) return;
  const dim = section.dataset.dim;
  const [name, type, bytes, kernel, loc, first, last] = report.sizes[dim][chosen[dim]].values[number];
  tip.textContent = `${name}: ${type}, ${bytes} bytes, steps ${first} to ${last}; by ${kernel} (${loc || "unknown line"})`;
  tip.style.left = event.pageX + 12 + "px";
  tip.style.top = event.pageY + 12 + "px";
});
