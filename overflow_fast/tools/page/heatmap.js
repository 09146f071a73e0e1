"use strict";
// Draws the sparklines and the heatmap; the pointer, the keys and the switches.
(async () => {
  const by = (id) => document.getElementById(id);
  const data = await loaded();
  const ROW = 16, GUTTER = 300, STRIP = 44, MARGIN = 12;
  const kinds = data.families.filter((kind) => data.entries.some((entry) => entry.family === kind));
  const shownFirst = data.incidents.map((each) => each.family).filter((kind) => kinds.includes(kind));
  const state = {find: "", show: "headroom", families: new Set([...kinds.slice(0, 1), ...shownFirst]),
    open: new Set(), shut: new Set(), all: false, from: 0, to: data.width,
    row: -1, column: -1, drag: null};
  const scroller = by("rows"), heat = by("heat"), sparklines = by("sparklines");
  const shownSparklines = Object.keys(data.sparklines);
  let rows = [], spread = null;
  const fixedScale = by("bits").innerHTML;

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name);
  const plotWidth = () => Math.max(50, scroller.clientWidth - gutter() - MARGIN);
  const gutter = () => Math.min(GUTTER, scroller.clientWidth * 0.4);
  const xOf = (column) => gutter() + (column - state.from) / (state.to - state.from) * plotWidth();

  function sized(canvas, height) {
    const width = scroller.clientWidth, ratio = window.devicePixelRatio || 1;
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    canvas.style.height = `${height}px`;
    canvas.style.width = `${width}px`;
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.font = "12px system-ui, sans-serif";
    pen.textBaseline = "middle";
    return pen;
  }

  function cut(pen, text, width) {  // the end of a long name tells more than its start
    if (pen.measureText(text).width <= width) return text;
    const parts = [...text.slice(-200)];
    let low = 0, high = parts.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (pen.measureText("…" + parts.slice(middle).join("")).width > width) low = middle + 1;
      else high = middle;
    }
    return "…" + parts.slice(low).join("");
  }

  const short = (value) => {  // a number that is not finite is a text
    if (typeof value === "string" || Number.isInteger(value)) return String(value);
    // Zeros behind the point alone: those before it are digits of the number.
    return value.toPrecision(4).replace(/(\.\d*?)0+($|e)/, "$1$2").replace(/\.($|e)/, "$1");
  };

  function range(low, high) {  // with as many digits as tell the two apart
    for (let digits = 4; digits < 17 && low !== high; digits++) {
      const ends = [low.toPrecision(digits), high.toPrecision(digits)];
      if (ends[0] !== ends[1]) return digits > 4 ? ends.join(" to ") : `${short(low)} to ${short(high)}`;
    }
    return short(low);
  }

  function drawSparklines() {
    const height = shownSparklines.length * STRIP + 20, pen = sized(sparklines, height);
    shownSparklines.forEach((name, i) => drawSparkline(pen, name, i * STRIP));
    pen.fillStyle = colour("--soft");
    const shown = state.to - state.from, count = Math.min(shown, Math.max(2, Math.floor(plotWidth() / 110)));
    for (let k = 0; k < count; k++) {
      const column = state.from + Math.floor(k * shown / count);
      pen.fillText(String(data.columns[column][0]), xOf(column), height - 9);
    }
    pen.fillText("first step of a column", 4, height - 9);
  }

  function drawSparkline(pen, name, top) {
    const values = data.sparklines[name].slice(state.from, state.to).map((v) => v === null ? null : Number(v));
    const known = values.filter((v) => v !== null && Number.isFinite(v));
    const low = Math.min(...known), high = Math.max(...known);
    const isLog = low > 0 && high > 100 * low, scale = isLog ? Math.log10 : (v) => v;
    const bottom = top + STRIP - 6, room = STRIP - 12;
    const yOf = (v) => high > low ? bottom - (scale(v) - scale(low)) / (scale(high) - scale(low)) * room : bottom - room / 2;
    pen.fillStyle = colour("--ink");
    pen.fillText(data.sparklineNames[name] + (isLog ? " (log)" : ""), 4, top + 14);
    pen.fillStyle = colour("--soft");
    if (known.length) pen.fillText(range(low, high), 4, top + 30);
    pen.strokeStyle = colour("--accent");
    pen.fillStyle = colour("--ink");
    pen.beginPath();
    let isDown = false;
    values.forEach((value, i) => {
      const x = (xOf(state.from + i) + xOf(state.from + i + 1)) / 2;
      if (value !== null && !Number.isFinite(value)) pen.fillRect(x - 1, top + 4, 2.5, STRIP - 10);
      if (value === null || !Number.isFinite(value)) { isDown = false; return; }
      if (isDown) pen.lineTo(x, yOf(value)); else pen.moveTo(x - 1, yOf(value));
      if (!isDown) pen.lineTo(x, yOf(value));
      isDown = true;
    });
    pen.stroke();
    pen.strokeStyle = colour("--line");
    pen.strokeRect(gutter(), top + 2, plotWidth(), STRIP - 6);
    markIncidents(pen, top + 2, STRIP - 6);
    cursorLine(pen, top + 2, STRIP - 6);
  }

  function markIncidents(pen, top, height) {
    pen.fillStyle = "#d100d1";
    for (const {step} of data.incidents) {
      const column = data.columns.findIndex(([first, last]) => first <= step && step <= last);
      if (column < state.from || column >= state.to) continue;
      pen.fillRect(xOf(column) - 1, top, 2, height);
      pen.fillRect(xOf(column + 1) - 1, top, 2, height);
    }
  }

  function cursorLine(pen, top, height) {
    if (state.column < state.from || state.column >= state.to) return;
    pen.strokeStyle = colour("--ink");
    const x = xOf(state.column);
    pen.strokeRect(x, top, Math.max(1, xOf(state.column + 1) - x), height);
  }

  function drawHeat() {
    const height = Math.max(ROW * 3, Math.min(rows.length * ROW, Math.floor(window.innerHeight * 0.7)));
    by("tall").style.height = `${Math.max(height, rows.length * ROW)}px`;
    const pen = sized(heat, height), width = Math.floor(plotWidth());
    const first = Math.floor(scroller.scrollTop / ROW), shift = scroller.scrollTop % ROW;
    const shown = rows.slice(first, first + Math.ceil(height / ROW) + 1);
    if (!shown.length) {
      pen.fillStyle = colour("--soft");
      pen.fillText("No entry matches.", 8, ROW);
    }
    const view = [state.show, state.from, state.to, width, spread, colour("--nonfinite")].join();
    pen.imageSmoothingEnabled = false;
    shown.forEach((row, i) => {
      pen.drawImage(cellsOf(row, width, view), gutter(), i * ROW - shift, width, ROW - (row.isGroup ? 2 : 1));
      drawName(pen, row, i * ROW - shift, width, first + i === state.row);
    });
    markIncidents(pen, 0, height);
    if (state.drag && state.drag.to !== state.drag.from) {
      const [a, b] = [state.drag.from, state.drag.to].sort((p, q) => p - q);
      pen.fillStyle = "rgba(11, 92, 173, 0.35)";
      pen.fillRect(xOf(a), 0, xOf(b + 1) - xOf(a), height);
    }
  }

  // The cells of a row, one pixel high. They are kept: scrolling then draws new rows alone.
  const drawn = new Map(), MOST_DRAWN = 600;
  function cellsOf(row, width, view) {
    const known = drawn.get(row);
    if (known && known.view === view) return known.cells;
    if (drawn.size >= MOST_DRAWN) drawn.clear();
    const cells = Object.assign(document.createElement("canvas"), {width, height: 1});
    drawCells(cells.getContext("2d"), row, width);
    drawn.set(row, {view, cells});
    return cells;
  }

  function drawCells(pen, row, width) {
    const columns = state.to - state.from;
    let x = 0;
    while (x < width) {  // one rectangle for neighbours of one colour
      const from = state.from + Math.floor(x * columns / width);
      const next = Math.max(x + 1, Math.ceil((from + 1 - state.from) * width / columns));
      const to = Math.max(from + 1, state.from + Math.floor(next * columns / width));
      const end = Math.min(width, next);
      const {code, entry} = cellOf(data, row, state.show, from, Math.min(to, state.to));
      const rgb = state.show === "headroom" ? bitColour(code, spread) : shareColour(code, entry.numel);
      pen.fillStyle = rgb ? `rgb(${rgb})` : colour("--nonfinite");
      pen.fillRect(x, 0, end - x, 1);
      x = end;
    }
  }

  function drawName(pen, row, top, width, isCurrent) {
    const sign = row.isGroup || row.canOpen ? (row.isOpen ? "▾ " : "▸ ") : "";
    const left = 4 + row.depth * 14;
    pen.fillStyle = colour("--ink");
    pen.font = `${row.isGroup ? "600 " : ""}12px system-ui, sans-serif`;
    const room = gutter() - left - 24, whole = row.name + (row.count || "");
    const text = pen.measureText(whole).width <= room ? whole : cut(pen, row.name, room);
    pen.fillText(sign + text, left, top + ROW / 2);
    if (!isCurrent) return;
    pen.strokeStyle = colour("--accent");
    pen.strokeRect(1, top + 0.5, gutter() + width - 1, ROW - 2);
    cursorLine(pen, top, ROW - 1);
  }

  function tell() {
    const row = rows[state.row];
    if (!row || state.column < 0) return;
    const {code, entry, steps} = cellOf(data, row, state.show, state.column, state.column + 1);
    const column = steps || data.columns[state.column];
    const about = `${entry.cls ? entry.cls + ", " : ""}${entry.kind.replace("_", " ")}, ${entry.dtype}`;
    const rank = row.rank === undefined ? "" : `${row.name}: `;
    const name = `${rank}${entry.name} (${about})`;
    const text = state.show === "headroom" ? bitText(code, entry, row.rank !== undefined) :
      row.rank === undefined ? countText(code, state.show === "num_zero" ? "zero" : "saturated", entry) :
        "counts are not kept by rank";
    const lines = [`${stepText(column)}: ${text}`,
      row.isGroup ? `${row.name}${row.count}; the worst here is ${name}` : name];
    lines.push(shownSparklines.map((name) => [name, data.sparklines[name][state.column]])
      .filter(([, value]) => value !== null)
      .map(([name, value]) => `${data.sparklineNames[name]} ${short(value)}`)
      .join(", "));
    by("readout").textContent = lines.join("\n");
  }

  let isAsked = false;
  function draw() {
    if (isAsked) return;
    isAsked = true;
    requestAnimationFrame(() => { isAsked = false; drawHeat(); drawSparklines(); tell(); });
  }

  let isScrolled = false;
  function drawScrolled() {  // what does not move is not drawn again
    if (isScrolled || isAsked) return;
    isScrolled = true;
    requestAnimationFrame(() => { isScrolled = false; drawHeat(); });
  }

  function rebuild() {
    const id = rows[state.row] && rows[state.row].id;
    rows = rowsOf(data, state);
    state.row = rows.findIndex((row) => row.id === id);
    if (state.row < 0 && rows.length) state.row = state.column < 0 ? -1 : 0;
    drawScale();
    by("fold").textContent = state.all ? "Fold all" : "Unfold all";
    by("legend-bits").hidden = state.show !== "headroom";
    by("legend-share").hidden = state.show === "headroom";
    draw();
  }

  // A run far from any maximum has a scale of its own, so that differences are seen.
  function drawScale() {
    spread = spreadOf(data, rows.flatMap((row) => row.depth ? [] : row.entries));
    by("bits").className = `scale ${spread ? "spread" : "bits"}`;
    if (!spread) { by("bits").innerHTML = fixedScale; return; }
    const [low, high] = spread.map((code) => (code / BITS).toFixed(1));
    by("bits").replaceChildren(tick("0", low), tick("100%", `${high} bits`));
  }

  function tick(left, text) {
    const mark = Object.assign(document.createElement("i"), {textContent: text});
    mark.style.left = left;
    if (left === "0") mark.style.transform = "none";  // no part of what stands before it
    return mark;
  }

  function toggle(row) {
    if (!row || !(row.isGroup || row.canOpen)) return;
    if (row.isOpen) { state.open.delete(row.id); state.shut.add(row.id); }
    else { state.open.add(row.id); state.shut.delete(row.id); }
    rebuild();
  }

  function zoom(from, to) {
    from = Math.max(0, Math.min(from, data.width - 1));
    to = Math.min(data.width, Math.max(to, from + 1));
    [state.from, state.to] = [from, to];
    draw();
  }

  function zoomBy(factor) {
    const shown = state.to - state.from, size = Math.max(1, Math.round(shown * factor));
    const isIn = state.column >= state.from && state.column < state.to;
    const middle = isIn ? state.column + 0.5 : (state.from + state.to) / 2;
    const from = Math.round(middle - size * (middle - state.from) / shown);
    const begin = Math.max(0, Math.min(from, data.width - size));
    zoom(begin, begin + size);
  }

  function placeOf(event) {
    const box = heat.getBoundingClientRect();
    const x = event.clientX - box.left, y = event.clientY - box.top;
    const part = (x - gutter()) / plotWidth();
    const column = state.from + Math.floor(part * (state.to - state.from));
    return {row: Math.floor((y + scroller.scrollTop) / ROW), isName: x < gutter(),
      column: Math.max(state.from, Math.min(column, state.to - 1))};
  }

  function moveTo(row, column) {
    state.row = Math.max(0, Math.min(row, rows.length - 1));
    state.column = Math.max(0, Math.min(column, data.width - 1));
    const shown = state.to - state.from;
    if (state.column < state.from) zoom(state.column, state.column + shown);
    if (state.column >= state.to) zoom(state.column + 1 - shown, state.column + 1);
    const top = state.row * ROW;
    if (top < scroller.scrollTop) scroller.scrollTop = top;
    const end = scroller.scrollTop + scroller.clientHeight - ROW;
    if (top > end) scroller.scrollTop += top - end;
    draw();
  }

  heat.addEventListener("pointermove", (event) => {
    const place = placeOf(event);
    if (place.row >= rows.length) return;
    [state.row, state.column] = [place.row, place.column];
    if (state.drag) state.drag.to = place.column;
    draw();
  });
  heat.addEventListener("pointerdown", (event) => {
    const place = placeOf(event);
    if (event.button === 0 && !place.isName) {
      state.drag = {from: place.column, to: place.column};
      heat.setPointerCapture(event.pointerId);
    }
  });
  heat.addEventListener("pointerup", (event) => {
    const drag = state.drag, place = placeOf(event);
    state.drag = null;
    if (place.isName) toggle(rows[place.row]);
    else if (drag && drag.from !== drag.to) zoom(Math.min(drag.from, drag.to), Math.max(drag.from, drag.to) + 1);
  });
  heat.addEventListener("pointercancel", () => { state.drag = null; draw(); });
  heat.addEventListener("dblclick", (event) => { if (!placeOf(event).isName) zoom(0, data.width); });
  heat.addEventListener("focus", () => { if (state.row < 0) moveTo(0, state.to - 1); });
  const KEYS = {
    ArrowUp: () => moveTo(state.row - 1, state.column),
    ArrowDown: () => moveTo(state.row + 1, state.column),
    ArrowLeft: () => moveTo(state.row, state.column - 1),
    ArrowRight: () => moveTo(state.row, state.column + 1),
    Home: () => moveTo(state.row, 0),
    End: () => moveTo(state.row, data.width - 1),
    PageUp: () => moveTo(state.row - 20, state.column),
    PageDown: () => moveTo(state.row + 20, state.column),
    Enter: () => toggle(rows[state.row]),
    " ": () => toggle(rows[state.row]),
    "+": () => zoomBy(0.5),
    "=": () => zoomBy(0.5),
    "-": () => zoomBy(2),
    0: () => zoom(0, data.width),
  };
  heat.addEventListener("keydown", (event) => {
    if (!KEYS[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    KEYS[event.key]();
  });
  by("zoom-in").onclick = () => zoomBy(0.5);
  by("zoom-out").onclick = () => zoomBy(2);
  by("zoom-all").onclick = () => zoom(0, data.width);
  by("fold").onclick = () => {
    state.all = !state.all;
    state.open.clear();
    state.shut.clear();
    rebuild();
  };
  by("find").oninput = (event) => { state.find = event.target.value; scroller.scrollTop = 0; rebuild(); };

  const shows = {headroom: "headroom", num_saturated: "saturated values", num_zero: "zeros"};
  for (const [name, text] of Object.entries(shows)) if (data[name]) by("show").add(new Option(text, name));
  by("show").onchange = (event) => { state.show = event.target.value; rebuild(); };
  for (const kind of kinds) {
    const box = Object.assign(document.createElement("input"), {type: "checkbox", checked: state.families.has(kind)});
    box.onchange = () => { state.families[box.checked ? "add" : "delete"](kind); rebuild(); };
    const label = document.createElement("label");
    label.append(box, ` ${kind}`);
    by("families").append(label);
  }

  scroller.addEventListener("scroll", drawScrolled);
  window.addEventListener("resize", draw);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  by("app").hidden = false;
  rebuild();
})().catch((error) => {
  document.getElementById("failed").hidden = false;
  throw error;
});
