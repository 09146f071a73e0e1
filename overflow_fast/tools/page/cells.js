"use strict";
// What the page carries, decoded; what cells mean, and their colours. No drawing.
const BITS = 16, NONFINITE = -32768, ALL_ZERO = 32766, NOT_SEEN = 32767;
const NOT_COUNTED = 0, NONE = 1, COUNTS_A_DOUBLING = 4;

async function inflated(name) {
  const node = document.querySelector(`script[data-name="${name}"]`);
  if (!node) return null;
  const raw = Uint8Array.from(atob(node.textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([raw]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

// Sums up the differences that grid.py has made; see payloads() there.
function summed(bytes, columns, Kind) {
  if (!bytes) return null;
  const wide = Kind === Int16Array, size = bytes.length / (wide ? 2 : 1);
  const values = new Kind(size);
  for (let i = 0; i < size; i++) {
    const step = bytes[i] | (wide ? bytes[size + i] << 8 : 0);
    values[i] = step + (i % columns ? values[i - 1] : 0);  // wraps as it was packed
  }
  return values;
}

const BIT_STOPS = [[0, 178, 24, 43], [1, 239, 138, 98], [4, 247, 247, 247],
  [8, 146, 197, 222], [16, 67, 147, 195], [32, 33, 102, 172]];
const SHARE_STOPS = [[-6, 239, 237, 245], [-3, 158, 154, 200], [0, 63, 0, 125]];
// Where nothing is near its maximum: from the least headroom of all to the most.
const SPREAD_STOPS = [[0, 198, 219, 239], [0.5, 107, 174, 214], [1, 8, 48, 107]];
const GREY = [153, 153, 153], PALE = [255, 255, 255];

function between(stops, value) {
  let i = 1;
  while (i < stops.length - 1 && value > stops[i][0]) i++;
  const [a, b] = [stops[i - 1], stops[i]];
  const part = Math.min(1, Math.max(0, (value - a[0]) / (b[0] - a[0])));
  return [1, 2, 3].map((k) => Math.round(a[k] + part * (b[k] - a[k])));
}

const SATURATED = 32 * BITS, LEAST_SPREAD = 8 * BITS;
const BIT_COLOURS = Array.from({length: SATURATED + 1}, (_, i) => between(BIT_STOPS, i / BITS));

// The least and the greatest headroom of entries, if all is beyond the fixed scale.
function spreadOf(data, entries) {
  let [low, high] = [NOT_SEEN, NONFINITE];
  for (const entry of entries) {
    for (let i = entry.index * data.width; i < (entry.index + 1) * data.width; i++) {
      const code = data.headroom[i];
      if (code === NONFINITE || code >= ALL_ZERO) continue;
      if (code < SATURATED) return null;
      if (code < low) low = code;
      if (code > high) high = code;
    }
  }
  // Within less the differences are noise, and are not to look like structure.
  return high - low >= LEAST_SPREAD ? [low, high] : null;
}

// A colour; null for what is not finite, whose colour depends on the scheme.
function bitColour(code, spread) {
  if (code === NONFINITE) return null;
  if (code === NOT_SEEN) return GREY;
  if (spread) return between(SPREAD_STOPS, (code - spread[0]) / (spread[1] - spread[0]));
  return BIT_COLOURS[Math.min(code, SATURATED)];
}

function countOf(code) {
  return code <= NONE ? 0 : Math.round(2 ** ((code - NONE - 1) / COUNTS_A_DOUBLING));
}

function shareColour(code, numel) {
  if (code === NOT_COUNTED) return GREY;
  if (code === NONE) return PALE;
  return between(SHARE_STOPS, Math.log10(Math.min(1, countOf(code) / Math.max(1, numel))));
}

function bitText(code, entry, isRank) {
  if (code === NONFINITE) return "non-finite (nan or inf)";
  if (code === NOT_SEEN) return "not checked";
  if (code === ALL_ZERO) return "all values were 0";
  const bits = code / BITS;
  const magnitude = (entry.limit / 2 ** bits).toPrecision(2);
  // Of ranks the page has half bits, rounded down.
  return isRank ? `${bits.toFixed(1)} to ${(bits + 0.5).toFixed(1)} bits of headroom, magnitude up to ${magnitude}`
    : `${bits.toFixed(1)} bits of headroom, magnitude about ${magnitude}`;
}

function countText(code, what, entry) {
  if (code === NOT_COUNTED) return `${what} values were not counted`;
  if (code === NONE) return `no ${what} value`;
  const number = countOf(code);
  return `${number > 8 ? "about " : ""}${number} ${what} of ${entry.numel} values (when first seen)`;
}

function stepText([first, last]) {
  return first === last ? `step ${first}` : `steps ${first} to ${last}`;
}

async function loaded() {
  const meta = JSON.parse(new TextDecoder().decode(await inflated("meta")));
  const width = meta.columns.length;
  const entries = meta.rows.map(([model, module, cls, kind, label, dtype, limit, numel,
    block, family], index) => ({model, module, cls, kind, label, dtype, limit: Number(limit),
    numel, block, family, index}));
  const hasModels = entries.some((entry) => entry.model);
  for (const entry of entries) {
    const module = entry.module || (entry.cls ? "the model" : "");
    entry.name = (hasModels ? `model ${entry.model}: ` : "") +
      (module ? `${module}: ${entry.label}` : entry.label);
  }
  return {
    ...meta, entries, width, hasModels,
    headroom: summed(await inflated("headroom"), width, Int16Array),
    num_saturated: summed(await inflated("num_saturated"), width, Uint8Array),
    num_zero: summed(await inflated("num_zero"), width, Uint8Array),
    rankCodes: summed(await inflated("ranks"), meta.rankColumns.length, Int16Array),
  };
}

// Rows that are shown: groups of neighbours of one block, their entries, and ranks.
function rowsOf(data, state) {
  const wanted = state.find.toLowerCase();
  const found = data.entries.filter((entry) => state.families.has(entry.family) &&
    (!wanted || `${entry.name} ${entry.cls} ${entry.dtype}`.toLowerCase().includes(wanted)));
  const groups = [];
  for (const entry of found) {
    const last = groups[groups.length - 1];
    const key = `${entry.model} ${entry.family} ${entry.block}`;
    if (last && last.key === key) last.entries.push(entry);
    else groups.push({key, entries: [entry]});
  }
  const rows = [];
  for (const {key, entries} of groups) {
    const isGroup = entries.length > 1, id = `${key} ${entries[0].index}`;
    const isOpen = !isGroup || wanted || state.open.has(id) || (state.all && !state.shut.has(id));
    if (isGroup) rows.push({id, entries, isGroup, isOpen, depth: 0, ...groupName(data, entries)});
    if (isOpen) for (const entry of entries) rows.push(...entryRows(data, state, entry, isGroup));
  }
  return rows;
}

function groupName(data, entries) {
  const [{model, block, family}] = entries;
  const where = data.hasModels ? `model ${model}: ` : "";
  return {name: `${where}${block || "the model"}`, count: ` (${entries.length} ${family})`};
}

function entryRows(data, state, entry, isInGroup) {
  const id = `entry ${entry.index}`, canOpen = data.rankColumns.length > 0;
  const isOpen = canOpen && state.open.has(id), depth = isInGroup ? 1 : 0;
  const own = {id, entries: [entry], canOpen, isOpen, depth, name: entry.name};
  if (!isOpen) return [own];
  const ranks = data.ranks.map((rank, index) =>
    ({id: `${id} ${index}`, entries: [entry], rank: index, depth: depth + 1, name: `rank ${rank}`}));
  return [own, ...ranks];
}

// The least headroom, or the most of a count, of a row in columns [from, to).
function cellOf(data, row, show, from, to) {
  if (row.rank !== undefined) return rankCell(data, row, show, from, to);
  const codes = data[show], isBits = show === "headroom";
  let worst = isBits ? NOT_SEEN : NOT_COUNTED, at = row.entries[0];
  for (const entry of row.entries) {
    const begin = entry.index * data.width;
    for (let i = from; i < to; i++) {
      const code = codes[begin + i];
      if (isBits ? code < worst : code > worst) [worst, at] = [code, entry];
    }
  }
  return {code: worst, entry: at};
}

// Ranks have columns of their own, with as many or more steps each.
function rankCell(data, row, show, from, to) {
  const entry = row.entries[0], width = data.rankColumns.length;
  if (show !== "headroom") return {code: NOT_COUNTED, entry};
  const begin = (row.rank * data.entries.length + entry.index) * width;
  const [first] = data.columns[from], last = data.columns[to - 1][1];
  let code = NOT_SEEN;
  const steps = [];
  for (let i = 0; i < width; i++) {
    if (data.rankColumns[i][0] > last || data.rankColumns[i][1] < first) continue;
    steps.push(data.rankColumns[i]);
    code = Math.min(code, data.rankCodes[begin + i]);
  }
  return {code, entry, steps: [steps[0][0], steps[steps.length - 1][1]]};
}
