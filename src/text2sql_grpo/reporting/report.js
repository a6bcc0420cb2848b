// The page of a run, drawn from the data in #data (see `reporting/report_page.py`). All texts of models and
// databases reach the page as text nodes.
const { html, render, useState, useEffect, useMemo } = preact;
const PAGE = 50; // rows drawn at once

const LIVE_MS = 5000; // between questions for newer data

async function read() {
  const raw = Uint8Array.from(atob(document.getElementById("data").textContent), (c) => c.charCodeAt(0));
  const plain = new Blob([raw]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(plain).json();
}

const percent = (share) => `${(share * 100).toFixed(0)}%`;
const seconds = (s) => (s < 90 ? `${Math.round(s)} s` : `${Math.round(s / 60)} min`);
const many = (count, one) => `${count.toLocaleString("en")} ${one}${count === 1 ? "" : "s"}`;
const shell = (text) => `'${text.replaceAll("'", `'\\''`)}'`;

function Dots({ sets, sides, unit }) {
  const left = 160, width = 560, row = 46, scale = (share) => left + share * (width - left - 20);
  const bar = (one, y, name) => html`<g class=${name}>
    <line x1=${scale(one.low)} x2=${scale(one.high)} y1=${y} y2=${y} stroke-width="2" />
    <circle cx=${scale(one.correct / one.total)} cy=${y} r="5" />
    <title>${name}: ${one.correct} of ${one.total}, ${percent(one.low)} to ${percent(one.high)}</title></g>`;
  return html`<svg viewBox="0 0 ${width} ${sets.length * row + 32}" role="img"
      aria-label="Strict accuracy by held-out set, before and after training">
    ${[0, 0.25, 0.5, 0.75, 1].map((share) => html`<line class="grid" x1=${scale(share)} x2=${scale(share)} y1="0"
        y2=${sets.length * row} /><text class="dim" x=${scale(share)} y=${sets.length * row + 20}
        text-anchor="middle">${percent(share)}</text>`)}
    ${sets.map((set, i) => html`<text x="0" y=${i * row + 27}>${set.name.slice(0, 18)}</text>
      ${set.before && bar(set.before, i * row + 16, "before")}${bar(set.after, i * row + 30, "after")}`)}
  </svg><p class="note">${sets.some((set) => set.before) ? `Grey: ${sides[0]}; blue: ${sides[1]}; lines` : "Lines"}:
    95% intervals ${unit}.</p>`;
}

function Curve({ points, kept }) {
  const width = 560, height = 230, left = 52, last = Math.max(...points.map((p) => p.step), 1);
  const x = (step) => left + (step / last) * (width - left - 20), y = (share) => 10 + (1 - share) * (height - 40);
  const line = points.map((p) => `${x(p.step)},${y(p.correct / p.total)}`).join(" ");
  const back = [...points].reverse().map((p) => `${x(p.step)},${y(p.low)}`);
  const band = [...points.map((p) => `${x(p.step)},${y(p.high)}`), ...back].join(" ");
  return html`<svg viewBox="0 0 ${width} ${height}" role="img" aria-label="Accuracy on dev by step">
    ${[0, 0.5, 1].map((share) => html`<line class="grid" x1=${left} x2=${width - 20} y1=${y(share)} y2=${y(share)} />
      <text class="dim" x=${left - 6} y=${y(share) + 4} text-anchor="end">${percent(share)}</text>`)}
    <polygon class="band" points=${band} /><polyline class="line" points=${line} />
    ${points.map((p) => html`<g class="after"><circle cx=${x(p.step)} cy=${y(p.correct / p.total)}
        r=${p.step === kept ? 6 : 3.5} />
      <title>step ${p.step}: ${p.correct} of ${p.total}${p.step === kept ? ", kept" : ""}</title></g>
      <text class="dim" x=${x(p.step)} y=${height - 8} text-anchor="middle">${p.step}</text>`)}
  </svg><p class="note">Right on dev by step, with its 95% interval; the large dot is the step that was kept.</p>`;
}

function Costs({ costs, hardware }) {
  const stages = Object.entries(costs.seconds);
  const total = stages.reduce((sum, [, s]) => sum + s, 0);
  return html`<p>${stages.length > 0 && `${seconds(total)} in all. `}${many(costs.episodes, "episode")},${" "}
    ${costs.tokens && `${many(costs.tokens, "token")}, `}${many(costs.queries, "exploratory query").replace("querys", "queries")}.
    ${costs.kwh !== null && ` GRPO took ${costs.kwh.toPrecision(2)} kWh, by codecarbon.`}
    ${hardware.type && ` On ${hardware.name || `${hardware.cpu_cores} cores`}.`}</p>
    ${stages.length > 0 && html`<table><tr><th>stage</th><th>time</th><th>processor</th></tr>
    ${stages.map(([name, s]) => html`<tr><td>${name}</td><td class="number">${seconds(s)}</td>
      <td class="number">${name in costs.cpu_seconds ? seconds(costs.cpu_seconds[name]) : ""}</td></tr>`)}</table>`}`;
}

function Samples({ samples }) {
  const names = Object.keys(samples[0].shares);
  return html`<div class="scroll"><table><tr><th>${samples[0].k} answers to each question</th>
      ${names.map((name) => html`<th>${name}</th>`)}</tr>
    ${samples.map((row) => html`<tr><td>${row.name}</td>${Object.values(row.shares).map((share) => html`
      <td class="number">${percent(share)}</td>`)}</tr>`)}</table></div>`;
}

function Heat({ heat }) {
  const families = [...new Set(Object.values(heat).flatMap(Object.keys))].sort();
  return html`<div class="scroll"><table><tr><th>database</th>${families.map((f) => html`<th>${f}</th>`)}</tr>
    ${Object.keys(heat).sort().map((name) => html`<tr><td>${name}</td>${families.map((family) => {
      const cell = heat[name][family];
      return cell ? html`<td class="heat" style=${{ "--share": cell[0] / cell[1] }}>${cell[0]}/${cell[1]}</td>`
        : html`<td></td>`; })}</tr>`)}</table></div>`;
}

function Evidence({ evidence }) {
  if (!evidence) return null;
  if (!evidence.gold) return html`<p class="note">Refused on a test database that was drawn for this answer and not kept.</p>`;
  const lines = { gold: evidence.gold.split("\n"), answer: evidence.answer.split("\n") };
  const only = (side, other) => { const left = [...lines[other].slice(1)]; return lines[side].map((line, i) => {
    const at = left.indexOf(line);
    if (i && at >= 0) left.splice(at, 1);
    const kind = i === 0 || at >= 0 ? "" : side === "gold" ? "missing" : "surplus";
    return html`<span class=${`row ${kind}`}>${line}</span>`; }); };
  return html`<h3>rows on the ${evidence.on}: gold query, then answer; marked where the other has no such row</h3>
    <pre>${only("gold", "answer")}</pre><pre>${only("answer", "gold")}</pre>
    ${evidence.tables.map((rows) => html`<pre class="reply">${rows}</pre>`)}`;
}

function Tokens({ pieces, gain }) {
  const [by, color] = useState("log-prob");
  const strength = (logProb) => (by === "mask" ? 0.5 : by === "log-prob" ? Math.min(1, -(logProb ?? 0) / 4)
    : Math.min(1, Math.abs(gain)));
  return html`<details class="tokens"><summary>tokens</summary>
    <select aria-label="color of tokens" onChange=${(event) => color(event.target.value)}>
      ${["log-prob", "mask", "advantage"].map((name) => html`<option>${name}</option>`)}</select>
    <pre>${pieces.map(([text, logProb]) => html`<span title=${logProb === null ? "environment" : `log-prob ${logProb}`}
      class=${logProb === null ? "environment" : by === "advantage" && gain < 0 ? "token down" : "token"}
      style=${logProb === null ? {} : { "--strength": strength(logProb) }}>${text}</span>`)}</pre></details>`;
}

function Side({ title, one, gain, texts }) {
  if (!one) return html`<div class="side"><h3>${title}</h3><p class="note">not asked</p></div>`;
  const scores = Object.entries(one.scores || {}).map(([name, score]) => `${name} ${score}`).join(", ");
  return html`<div class="side"><h3>${title}: <span class=${one.strict ? "right" : "wrong"} title=${texts[one.reason]}>
      ${one.strict ? "right" : one.reason}</span></h3>
    <p class="note">${[one.reward !== null && `reward ${one.reward}${scores && ` (${scores})`}`,
      `${one.tokens} tokens`, `ended: ${one.stop_reason}`, one.is_masked && "masked", one.gap,
      one.official && !one.strict && "right by the official metric only", ...one.flags].filter(Boolean).join("; ")}</p>
    ${one.turns.map(([role, text]) => html`<pre class=${role === "assistant" ? "" : "reply"}>${text}</pre>`)}
    <${Evidence} evidence=${one.evidence} />
    ${one.pieces && html`<${Tokens} pieces=${one.pieces} gain=${gain} />`}</div>`;
}

function Item({ mark, row, data, children }) {
  const { id } = row, { schemas, sources, model } = data;
  const open = location.hash.slice(1) === id;
  const [shown, show] = useState(open);
  useEffect(() => { if (open) document.getElementById(id).scrollIntoView(); }, []);
  const source = sources[row.database] ? shell(sources[row.database]) : "DATABASE";
  const command = `text2sql-grpo ask ${shell(row.question)} --model ${shell(model)} --db ${source}`;
  return html`<details id=${id} open=${shown} onToggle=${(event) => { show(event.target.open);
      if (event.target.open) history.replaceState(null, "", `#${id}`); }}>
    <summary>${mark} ${row.question} <span class="dim">(${row.database}; ${row.skills.join(", ")})</span></summary>
    ${shown && html`<div class="body"><h3>gold query</h3><pre>${row.gold_sql}</pre>
      <div class="sides">${children()}</div>
      <h3>schema as the model reads it</h3><pre>${schemas[row.database]}</pre>
      <h3>rerun</h3><pre>${command}</pre></div>`}</details>`;
}

function List({ rows, data, filters, sorts, item, label }) {
  const [filter, setFilter] = useState("all"), [sort, setSort] = useState(Object.keys(sorts)[0]);
  const [text, setText] = useState(""), [count, setCount] = useState(PAGE);
  const [linked] = useState(location.hash.slice(1));
  const found = useMemo(() => {
    const wanted = rows.filter((row) => (filter === "all" || filters[filter](row)) &&
      (!text || `${row.question} ${row.gold_sql} ${row.database}`.toLowerCase().includes(text.toLowerCase())));
    const ordered = wanted.sort(sorts[sort]), at = ordered.findIndex((row) => row.id === linked);
    return at > 0 ? [ordered[at], ...ordered.slice(0, at), ...ordered.slice(at + 1)] : ordered;
  }, [rows, filter, sort, text]);
  const press = (name) => { setFilter(name); setCount(PAGE); };
  return html`<div class="filters" role="group" aria-label=${label}>
      ${["all", ...Object.keys(filters).filter((name) => rows.some(filters[name]))].map((name) => html`<button aria-pressed=${filter === name}
        onClick=${() => press(name)}>${name} ${name === "all" ? rows.length : rows.filter(filters[name]).length}</button>`)}
      <select aria-label="order" onChange=${(event) => setSort(event.target.value)}>
        ${Object.keys(sorts).map((name) => html`<option>${name}</option>`)}</select>
      <input type="search" placeholder="search" aria-label="search" onInput=${(event) => setText(event.target.value)} /></div>
    ${found.slice(0, count).map((row) => html`<${item} key=${row.id} row=${row} data=${data} />`)}
    ${found.length === 0 && html`<p class="note">None.</p>`}
    ${found.length > count && html`<p><button onClick=${() => setCount(count + PAGE)}>
      ${found.length - count} more</button></p>`}`;
}

const by = (key) => (a, b) => (key(a) < key(b) ? -1 : key(a) > key(b) ? 1 : 0);
const ANSWERS = {
  gained: (r) => r.before && !r.before.strict && r.after.strict,
  lost: (r) => r.before && r.before.strict && !r.after.strict,
  wrong: (r) => !r.after.strict,
  "official only": (r) => r.after.official && !r.after.strict,
  "failed queries": (r) => r.after.errors.length > 0 || r.after.reason === "query_failed",
  "time-outs": (r) => r.after.is_late,
  "hard-coded": (r) => r.after.flags.includes("no_table"),
  flagged: (r) => r.after.flags.length > 0,
  "suspect golds": (r) => r.is_suspect,
  masked: (r) => r.after.is_masked,
};
const spread = (r) => new Set(r.episodes.map((one) => one.reward)).size;
const GROUPS = {
  "zero variance": (r) => spread(r) < 2,
  "rewards differ": (r) => spread(r) > 1,
  "all right": (r) => r.episodes.every((one) => one.strict),
  "all wrong": (r) => !r.episodes.some((one) => one.strict),
  masked: (r) => r.episodes.some((one) => one.is_masked),
  flagged: (r) => r.episodes.some((one) => one.flags.length > 0),
};

function Overview({ data }) {
  const { sets, curve, samples, sides } = data;
  return html`<h1>${data.name}</h1>
    <p class="result">${data.result || "No comparison of before and after yet."}</p>
    ${data.missing.length > 0 && html`<p class="note">Not in the run folder: ${data.missing.join(", ")}.</p>`}
    ${data.warnings.map((text) => html`<p class="note">Warning: ${text}</p>`)}
    ${data.left_out && html`<p class="note">${data.left_out}</p>`}
    ${data.diagnosis.length > 0 && html`<ol>${data.diagnosis.map((line) => html`<li>${line}</li>`)}</ol>`}
    <div class="columns">
      ${sets.length > 0 && html`<section><h2>Held-out sets</h2><${Dots} sets=${sets} sides=${sides}
        unit=${data.interval_unit} /></section>`}
      ${curve.length > 0 && html`<section><h2>Training</h2><${Curve} points=${curve} kept=${data.kept_step} /></section>`}
      ${samples.length > 0 && html`<section><h2>Votes</h2><${Samples} samples=${samples} /></section>`}
      ${(data.costs.episodes > 0 || Object.keys(data.costs.seconds).length > 0) && html`<section><h2>Cost</h2>
        <${Costs} costs=${data.costs} hardware=${data.hardware} /></section>`}
      ${data.reasons.length > 0 && html`<section><h2>Why answers are right or wrong</h2><table>
        ${data.reasons.map(([reason, count]) => html`<tr><td>${reason === "equal" ? "right" : reason}</td><td class="number">${count}</td>
          <td class="note">${data.reason_texts[reason]}</td></tr>`)}
        </table>${Object.entries(data.gaps).map(([gap, count]) => html`<p class="note">${many(count, "accepted answer")}
          ${" "}checked less than configured: ${gap}.</p>`)}</section>`}
    </div>`;
}

const mean = (values) => values.reduce((sum, one) => sum + one, 0) / values.length;

function Answer({ row, data }) {
  const { sides, reason_texts } = data;
  return html`<${Item} row=${row} data=${data}
    mark=${html`<span class="mark ${row.after.strict ? "right" : "wrong"}">${ANSWERS.gained(row) ? "gained"
      : ANSWERS.lost(row) ? "lost" : row.after.strict ? "right" : "wrong"}</span>`}>${() => html`
      ${row.before && html`<${Side} texts=${reason_texts} title=${sides[0]} one=${row.before} />`}
      <${Side} texts=${reason_texts} title=${row.before ? sides[1] : "answer"} one=${row.after} />`}<//>`;
}

function Group({ row, data }) {
  return html`<${Item} row=${row} data=${data}
    mark=${html`<span class="mark">${row.step > 0 && `step ${row.step}: `}${row.episodes.filter((one) => one.strict).length} of
      ${" "}${row.episodes.length}</span>`}>${() => row.episodes.map((one, i) => html`
      <${Side} texts=${data.reason_texts} title=${`episode ${i + 1}`} one=${one}
        gain=${one.reward - mean(row.episodes.map((each) => each.reward))} />`)}<//>`;
}

function Report({ data }) {
  const { answers, groups } = data;
  return html`
    ${Object.keys(data.heat).length > 0 && html`<h2>Right by database and skill</h2><${Heat} heat=${data.heat} />`}
    ${answers.length > 0 && html`<h2 id="answers">Held-out answers</h2><${List} label="answers" rows=${answers} data=${data}
      filters=${ANSWERS} item=${Answer} sorts=${{ "as asked": () => 0, "by database": by((r) => r.database),
        "by skill": by((r) => r.skills.join()), "longest first": by((r) => -r.after.tokens) }} />`}
    ${groups.length > 0 && html`<h2 id="groups">Groups of episodes</h2><${List} label="groups" rows=${groups} data=${data}
      filters=${GROUPS} item=${Group} sorts=${{ "last step first": by((r) => -r.step), "first step first": by((r) => r.step),
        "by database": by((r) => r.database), "by skill": by((r) => r.skills.join()),
        "longest first": by((r) => -Math.max(...r.episodes.map((one) => one.tokens))),
        "by reward": by((r) => -mean(r.episodes.map((one) => one.reward))) }} />`}
    <h2>Config and versions</h2>
    <p class="note">${Object.entries(data.versions).map(([name, number]) => `${name} ${number}`).join(", ")}</p>
    ${data.config && html`<details><summary>config.yaml</summary><pre>${data.config}</pre></details>`}`;
}

function Page({ runs }) {
  const [chosen, choose] = useState(0);
  const run = runs[Math.min(chosen, runs.length - 1)];
  if (runs.length === 1) return html`<${Overview} data=${run} /><${Report} data=${run} />`;
  return html`<div class="beside">${runs.map((one) => html`<div><${Overview} data=${one} /></div>`)}</div>
    <div class="filters" role="group" aria-label="run">${runs.map((one, i) => html`<button aria-pressed=${i === chosen}
      onClick=${() => choose(i)}>${one.name}</button>`)}</div><${Report} key=${run.name} data=${run} />`;
}

function named(runs) {
  for (const run of runs) {
    run.answers.forEach((row) => { row.id = `answer/${encodeURIComponent(`${row.set}/${row.example}`)}`; });
    run.groups.forEach((row) => { row.id = `group/${row.step}/${encodeURIComponent(row.example)}`; });
  }
  return runs;
}

const page = document.getElementById("page");
const draw = (runs) => render(html`<${Page} runs=${named(runs)} />`, page);
const first = await read();
page.replaceChildren();
draw(first);
if ("live" in document.getElementById("data").dataset) {
  let known = JSON.stringify(first);
  setInterval(async () => {
    const answer = await fetch("data").catch(() => null);
    const text = answer?.ok ? await answer.text() : known;
    if (text !== known) draw(JSON.parse(known = text));
  }, LIVE_MS);
}
