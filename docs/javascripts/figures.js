// Draws the figures of executed pages when they come into view, in the colours of the page's theme.
"use strict";
(() => {
  const TEXT = { light: "#2a2a2a", dark: "#d5d7dc" };
  const GRID = { light: "#e6e8ec", dark: "#3d414b" };
  // Least size of a figure of panels beside its own size.
  const SMALLEST = 0.7;
  const drawn = new Set();
  const pen = document.createElement("canvas").getContext("2d", { willReadFrequently: true });

  const theme = () => (document.body.dataset.mdColorScheme === "slate" ? "dark" : "light");

  // Red, green, blue and opacity of any CSS colour; null for what is none.
  function parse(colour) {
    pen.clearRect(0, 0, 1, 1);
    pen.fillStyle = "#010203";
    pen.fillStyle = colour;
    if (pen.fillStyle === "#010203") return null;
    const named = /^rgba\(.*,\s*([\d.]+)\)$/.exec(pen.fillStyle);
    pen.globalAlpha = 1;
    const opaque = pen.fillStyle.replace(/^rgba\((.*),[^,]*\)$/, "rgb($1)");
    pen.fillStyle = opaque;
    pen.fillRect(0, 0, 1, 1);
    return [...pen.getImageData(0, 0, 1, 1).data.slice(0, 3), named ? Number(named[1]) : 1];
  }

  // A colour that was chosen for white paper, for dark paper: the hue stays, dark colours become light ones.
  function onDark(colour) {
    const rgba = typeof colour === "string" && parse(colour);
    if (!rgba) return colour;
    const [r, g, b] = rgba.slice(0, 3).map((value) => value / 255);
    const most = Math.max(r, g, b), least = Math.min(r, g, b);
    const light = (most + least) / 2, range = most - least;
    const saturation = range === 0 ? 0 : range / (1 - Math.abs(2 * light - 1));
    let hue = 0;
    if (range > 0) {
      if (most === r) hue = ((g - b) / range + 6) % 6;
      else if (most === g) hue = (b - r) / range + 2;
      else hue = (r - g) / range + 4;
    }
    const lighter = saturation < 0.15 ? 0.16 + 0.7 * (1 - light) : Math.max(light, 0.64);
    return `hsla(${Math.round(hue * 60)}, ${Math.round(saturation * 85)}%, ${Math.round(lighter * 100)}%, ${rgba[3]})`;
  }

  const COLOURS = new Set(["color", "fillcolor", "bgcolor", "bordercolor", "linecolor", "gridcolor", "zerolinecolor", "outlinecolor"]);

  // Tick labels that name their colour in markup.
  const spanOnDark = (text) => String(text).replace(/color:\s*([^;"']+)/g, (_, colour) => `color:${onDark(colour)}`);

  function recolour(node) {
    if (Array.isArray(node)) return node.map((one) => (one && typeof one === "object" ? recolour(one) : one));
    const copy = {};
    for (const [key, value] of Object.entries(node)) {
      if (key === "ticktext" && Array.isArray(value)) copy[key] = value.map(spanOnDark);
      else if (COLOURS.has(key)) copy[key] = Array.isArray(value) ? value.map(onDark) : onDark(value);
      else if (key === "colorscale" || !value || typeof value !== "object") copy[key] = value;
      else copy[key] = recolour(value);
    }
    return copy;
  }

  // A figure of panels in rows, as `Report.plot` draws it, with its panels in one column.
  function inOneColumn(data, layout) {
    const { rows, columns } = layout.meta, count = layout.meta.panels;
    const top = (panel) => 1 - Math.floor(panel / columns) / rows;
    // The panel at a place, and a place in the whole after all panels moved.
    const panelAt = (x, y) => Math.floor((1 - y) * rows) * columns + Math.floor(x * columns);
    const across = (x, panel) => x * columns - (panel % columns);
    const along = (y, panel) => 1 - panel / count - ((top(panel) - y) * rows) / count;
    const middle = (axis) => (axis.domain[0] + axis.domain[1]) / 2;
    const moved = { ...layout, width: layout.width / columns, height: (layout.height * count) / rows };
    const panelOf = {};
    for (const [key, axis] of Object.entries(layout)) {
      if (!/^[xy]axis\d*$/.test(key)) continue;
      const anchor = layout[`${axis.anchor[0]}axis${axis.anchor.slice(1)}`];
      const [x, y] = key[0] === "x" ? [axis, anchor] : [anchor, axis];
      const panel = panelAt(middle(x), middle(y));
      panelOf[key.replace("axis", "")] = panel;
      moved[key] = { ...axis, domain: axis.domain.map((end) => (key[0] === "x" ? across(end, panel) : along(end, panel))) };
    }
    for (const key of Object.keys(layout).filter((name) => /^legend\d*$/.test(name))) {
      const panel = panelAt(layout[key].x, layout[key].y + 1e-6);
      moved[key] = { ...layout[key], x: across(layout[key].x, panel), y: along(layout[key].y, panel) };
    }
    const bar = (own, panel) => ({ ...own, x: across(own.x, panel), y: along(own.y, panel), len: (own.len * rows) / count });
    const traces = data.map((trace) => (trace.colorbar ? { ...trace, colorbar: bar(trace.colorbar, panelOf[trace.xaxis || "x"]) } : trace));
    // Notes at the upper left corner of a panel belong to it.
    moved.annotations = (layout.annotations || []).map((note) => {
      if (note.xref !== "paper" || note.yref !== "paper") return note;
      const panel = panelAt(note.x + 1e-6, note.y - 1e-6);
      return { ...note, x: across(note.x, panel), y: along(note.y, panel) };
    });
    return { data: traces, layout: moved };
  }

  // Pixels beside a title, of both sides.
  const BESIDE = 32;

  // Text that was broken for a figure of one width, broken anew for another. Lines with tags stay.
  function broken(text, size, family, width, room) {
    const lines = [];
    let before = "";
    for (const line of text.split("<br>")) {
      // The line before was full: both are one sentence.
      const full = `${before} ${line.split(" ")[0]}`.length > (width - 40) / (0.5 * size);
      if (before && full && !(before + line).includes("<")) lines.push(`${lines.pop()} ${line}`);
      else lines.push(line);
      before = line;
    }
    pen.font = `${size}px ${family}`;
    const fits = (line) => line.includes("<") || pen.measureText(line).width <= room - BESIDE;
    return lines
      .flatMap((line) =>
        line.split(" ").reduce((done, word) => {
          const longer = done.length ? `${done[done.length - 1]} ${word}` : word;
          return done.length && (fits(line) || fits(longer)) ? [...done.slice(0, -1), longer] : [...done, word];
        }, []),
      )
      .join("<br>");
  }

  // A figure for less room than its own width: its title and subtitle in more lines, above a plot of the same height.
  function narrower(layout, family, room) {
    const { title, margin, width, height } = layout;
    // Figures of this package name the sizes of their letters.
    if (!title || !title.subtitle || !title.font || !height) return layout;
    const again = (part) => (part.text ? { ...part, text: broken(part.text, part.font.size, family, width, room) } : part);
    const parts = { ...again(title), subtitle: again(title.subtitle) };
    const lines = (part) => (part.text || "").split("<br>").length;
    const ofTitle = (lines(parts) - lines(title)) * title.font.size;
    const ofSubtitle = (lines(parts.subtitle) - lines(title.subtitle)) * (title.subtitle.font || title.font).size;
    const added = Math.round(1.25 * ofTitle + 1.35 * ofSubtitle);
    parts.pad = { ...title.pad, t: title.pad.t + 0.6 * ofTitle };
    return { ...layout, title: parts, height: height + added, margin: { ...margin, t: margin.t + added } };
  }

  const place = (x, y) => `${x || "x"} ${y || "y"}`;

  function specification(element) {
    const source = JSON.parse(element.querySelector("script").textContent);
    let { data, layout } = source;
    // Lines in the colours of a colour bar keep them, and their white paper.
    const scaled = data.some((trace) => trace.marker && (trace.marker.showscale || trace.marker.colorbar));
    const mode = scaled ? "light" : theme();
    const paper = scaled && theme() === "dark" ? "#ffffff" : "rgba(0,0,0,0)";
    // Axes of heat maps.
    const maps = new Set(data.filter((trace) => trace.type === "heatmap").map((trace) => place(trace.xaxis, trace.yaxis)));
    if (mode === "dark") {
      // Marks on the cells of a heat map were chosen for the colours of the cells, which stay.
      const kept = (trace) => maps.has(place(trace.xaxis, trace.yaxis)) && trace.meta !== "tick labels";
      data = data.map((trace) => (kept(trace) ? trace : recolour(trace)));
      const { annotations, shapes, template, ...rest } = layout;
      const keep = (item) => (maps.has(place(item.xref, item.yref)) ? item : recolour(item));
      layout = { ...recolour(rest), template };
      if (annotations) layout.annotations = annotations.map(keep);
      if (shapes) layout.shapes = shapes.map(keep);
    }
    const base = structuredClone(layout.template || { layout: {} });
    base.layout.font = { ...base.layout.font, color: TEXT[mode] };
    const family = getComputedStyle(document.body).fontFamily;
    layout = { ...layout, font: { ...layout.font, family } };
    for (const axis of ["xaxis", "yaxis"]) {
      base.layout[axis] = { ...base.layout[axis], gridcolor: GRID[mode], zerolinecolor: GRID[mode], linecolor: GRID[mode] };
    }
    layout = { ...layout, template: base, paper_bgcolor: paper, plot_bgcolor: "rgba(0,0,0,0)" };
    if (mode === "dark") layout.hoverlabel = { bgcolor: "#22252c", font: { color: TEXT.dark }, ...layout.hoverlabel };
    layout.modebar = { bgcolor: "rgba(0,0,0,0)", color: "#9aa0aa", activecolor: TEXT[mode] };
    const room = element.clientWidth;
    let scale = 1;
    if (layout.meta && layout.meta.panels > 1 && room < SMALLEST * layout.width) ({ data, layout } = inOneColumn(data, layout));
    if (layout.width > room && layout.xaxis2 && layout.width > 600) {
      // Panels side by side become smaller as a whole, since they would overlap; where letters would be too small, they are scrolled.
      scale = Math.max(SMALLEST, room / layout.width);
    } else if (layout.width > room) {
      // Heat maps keep their proportions.
      if (maps.size && layout.height) layout.height = Math.max(320, Math.round((layout.height * room) / layout.width));
      // So do the numbers in their cells, down to letters that can be read.
      const ratio = room / layout.width;
      const smaller = (font) => ({ ...font, size: Math.min(font.size, Math.max(8, Math.floor(font.size * ratio))) });
      data = data.map((trace) => (trace.type === "heatmap" && trace.textfont ? { ...trace, textfont: smaller(trace.textfont) } : trace));
      layout = { ...narrower(layout, family, room), width: room };
    } else if (!layout.width) {
      layout.width = room;
    }
    return { data, layout, scale };
  }

  function draw(element) {
    let place = element.querySelector(".executed-figure__plot");
    if (!place) {
      place = document.createElement("div");
      place.className = "executed-figure__plot";
      element.append(place);
    }
    const { data, layout, scale } = specification(element);
    // White paper on a dark page, as images in site.css.
    place.style.filter = layout.paper_bgcolor === "#ffffff" ? "brightness(0.82)" : "";
    place.style.transform = scale < 1 ? `scale(${scale})` : "";
    place.style.height = scale < 1 ? `${layout.height * scale}px` : "";
    if (layout.height) element.style.minHeight = `${layout.height * scale}px`;
    Plotly.react(place, data, layout, { displaylogo: false, modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]] });
    drawn.add(element);
  }

  const observer = new IntersectionObserver(
    (entries) => {
      for (const entry of entries) {
        if (!entry.isIntersecting) continue;
        observer.unobserve(entry.target);
        draw(entry.target);
      }
    },
    { rootMargin: "400px 0px" },
  );
  const all = document.querySelectorAll(".executed-figure");
  for (const element of all) observer.observe(element);

  const again = () => drawn.forEach((element) => element.clientWidth && draw(element));
  new MutationObserver(again).observe(document.body, { attributes: true, attributeFilter: ["data-md-color-scheme"] });
  let waiting, width = window.innerWidth;
  window.addEventListener("resize", () => {
    if (window.innerWidth === width) return;
    width = window.innerWidth;
    clearTimeout(waiting);
    waiting = setTimeout(again, 150);
  });
  window.addEventListener("beforeprint", () => all.forEach((element) => element.clientWidth && draw(element)));
})();
