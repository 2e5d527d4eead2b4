"use strict";
// Draws the figures as they come into view, sorts tables, and marks the section in view in the contents.

const CONFIG = { displaylogo: false, responsive: true };
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const places = [...document.querySelectorAll("[data-figure]")];
const figures = JSON.parse(document.getElementById("figures").textContent);
let printing = false;

function start() {
  const observer = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      observer.unobserve(entry.target);
      draw(entry.target);
    }
  }, { rootMargin: "600px" });
  places.forEach((place) => observer.observe(place));
}

function draw(place) {
  const figure = figures[place.dataset.figure];
  const inDark = dark.matches && !printing;
  const { width, ...layout } = inDark ? darkened(figure.layout) : structuredClone(figure.layout);
  layout.autosize = true;
  // Heat maps of square cells are as much lower as they are narrower.
  if (layout.yaxis && layout.yaxis.scaleanchor) {
    layout.height -= Math.max(0, width - place.clientWidth);
    place.style.height = `${layout.height}px`;
  }
  const traces = inDark ? darkened(figure.data) : structuredClone(figure.data);
  if (inDark) onDarkPage(layout);
  Plotly.react(place, traces, layout, CONFIG);
  place.dataset.drawn = inDark ? "dark" : "light";
}

// Figures are made for a white page. On a dark one, grounds are left out and dark inks are made light; colour scales stay.
function onDarkPage(layout) {
  const own = ((layout.template ||= {}).layout ||= {});
  const clear = { paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)" };
  Object.assign(own, clear);
  Object.assign(layout, clear);
  own.font = { ...own.font, color: "#dde4ec" };
  layout.modebar = { ...layout.modebar, bgcolor: "rgba(0,0,0,0)", color: "#7b8896", activecolor: "#dde4ec" };
  if (layout.font) layout.font.color = "#dde4ec";
  for (const name of ["xaxis", "yaxis"]) {
    own[name] = { ...own[name], gridcolor: "#333d48", linecolor: "#7b8896", tickcolor: "#7b8896", zerolinecolor: "#4a5663" };
  }
  for (const name of Object.keys(layout).filter((key) => /^[xy]axis/.test(key))) {
    delete layout[name].gridcolor;
    delete layout[name].zerolinecolor;
  }
}

const COLOUR = /^#([0-9a-f]{2})([0-9a-f]{2})([0-9a-f]{2})$|^rgba?\((\d+), *(\d+), *(\d+)(?:, *([\d.]+))?\)$/i;

function darkened(value, key = "") {
  if (["colorscale", "customdata", "text"].includes(key)) return value;
  // Tick labels name their colour in markup.
  if (key === "ticktext") return value.map((text) => String(text).replace(/color:(#\w+)/g, (_, colour) => `color:${darkened(colour, "color")}`));
  if (Array.isArray(value)) return value.map((one) => darkened(one, key));
  if (value && typeof value === "object") return Object.fromEntries(Object.entries(value).map(([name, one]) => [name, darkened(one, name)]));
  const match = typeof value === "string" && /color$/i.test(key) && (value === "black" ? "#000000" : value).match(COLOUR);
  if (!match) return value;
  const parts = match[1] ? [1, 2, 3].map((at) => parseInt(match[at], 16)) : [4, 5, 6].map((at) => Number(match[at]));
  const light = 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
  if (light >= 130) return value;
  const grey = Math.max(...parts) - Math.min(...parts) < 24;
  // Dark greys are turned over; hues that are dark are mixed with white. Bands are fainter on black than on white.
  const lighter = parts.map((part) => Math.round(grey ? 235 - part / 2 : part * 0.62 + 97));
  return `rgba(${lighter.join(",")},${Math.min(1, 2 * (match[7] ?? 1))})`;
}

function redraw() {
  for (const place of places) if (place.dataset.drawn) draw(place);
}

function sortable(table) {
  const body = table.tBodies[0];
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const order = (a, b) => compare(a.cells[column].textContent, b.cells[column].textContent, down ? -1 : 1);
      body.append(...[...body.rows].sort(order));
    });
  });
}

// Numbers by value, with or without a margin; texts as texts; undefined numbers last.
function compare(a, b, sign) {
  const [x, y] = [parseFloat(a), parseFloat(b)];
  if (Number.isNaN(x) && Number.isNaN(y)) return sign * a.localeCompare(b, "en", { numeric: true });
  if (Number.isNaN(x) || Number.isNaN(y)) return Number.isNaN(x) ? 1 : -1;
  return sign * (x - y);
}

function markSection() {
  const links = new Map([...document.querySelectorAll("nav a")].map((link) => [decodeURIComponent(link.hash.slice(1)), link]));
  const observer = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      const link = links.get(entry.target.id);
      if (link) link.toggleAttribute("aria-current", entry.isIntersecting);
    }
  }, { rootMargin: "-20% 0px -70% 0px" });
  document.querySelectorAll("main > [id]").forEach((section) => observer.observe(section));
}

document.querySelectorAll("table:has(thead)").forEach(sortable);
markSection();
dark.addEventListener("change", redraw);
window.addEventListener("beforeprint", () => {
  printing = true;
  places.forEach((place) => { if (place.dataset.drawn !== "light") draw(place); });
});
window.addEventListener("afterprint", () => {
  printing = false;
  redraw();
});
start();
