// The page of `serve`: questions, the agent's turns as they come, tables, charts and feedback. All texts of models and
// databases reach the page as text nodes.
const { html, render, useState, useEffect, useMemo } = preact;
const SHOWN = 100; // rows of a table

const given = new URLSearchParams(location.hash.slice(1)).get("token");
if (given) {
  sessionStorage.setItem("token", given);
  history.replaceState(null, "", location.pathname);
}

async function call(path, body) {
  const headers = { Authorization: `Bearer ${sessionStorage.getItem("token") || ""}` };
  const options = body ? { method: "POST", headers, body: JSON.stringify(body) } : { headers };
  let answer;
  try {
    answer = await fetch(path, options);
  } catch {
    throw new Error("The server does not answer. Start it again, then repeat the question.");
  }
  if (answer.ok) return answer;
  const text = await answer.text();
  let message = text;
  try { message = JSON.parse(text).error.message; } catch { /* not JSON */ }
  throw new Error(answer.status === 401 ? "Open the address that the terminal prints: it holds the token." : message);
}

async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read().catch(() => { throw new Error("The connection to the server broke."); });
    if (done) return;
    const lines = (rest + value).split(/\r?\n/);
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data: ")) yield JSON.parse(line.slice(6));
  }
}

const shown = (cell) => (cell === null ? "NULL" : String(cell));

function Table({ result }) {
  const [count, setCount] = useState(SHOWN);
  if (result.status !== "ok") return html`<p class="wrong">${result.error}</p>`;
  if (!result.rows.length) return html`<p class="note">No rows.</p>`;
  return html`<div class="table" tabindex="0"><table><thead><tr>${result.columns.map((name, i) => html`
      <th class=${typeof result.rows[0][i] === "number" ? "number" : ""}>${name}</th>`)}</tr></thead>
    <tbody>${result.rows.slice(0, count).map((row) => html`<tr>${row.map((cell) => html`
      <td class=${typeof cell === "number" ? "number" : cell === null ? "null" : ""}>${shown(cell)}</td>`)}</tr>`)}</tbody></table></div>
    <p class="note">${result.rows.length}${result.is_truncated ? " or more" : ""} row${result.rows.length === 1 && !result.is_truncated ? "" : "s"}
      ${result.rows.length > count && html` <button onClick=${() => setCount(count + 500)}>more</button>`}</p>`;
}

// A bar or line for each of 2 to 60 rows of a text or date and a number.
function chartOf(result) {
  if (result.status !== "ok" || result.columns.length !== 2 || result.rows.length < 2 || result.rows.length > 60) return null;
  const numbers = [0, 1].map((i) => result.rows.every((row) => typeof row[i] === "number"));
  const value = numbers[1] ? 1 : numbers[0] ? 0 : -1;
  if (value < 0 || (numbers[0] && numbers[1])) return null;
  const rows = result.rows.map((row) => [shown(row[1 - value]), row[value]]);
  return { rows, isTime: rows.every(([name]) => /^\d{4}(-\d\d){0,2}/.test(name)), unit: result.columns[value] };
}

function Chart({ chart }) {
  const { rows, isTime, unit } = chart;
  const high = Math.max(0, ...rows.map((row) => row[1])), low = Math.min(0, ...rows.map((row) => row[1]));
  const label = `${unit} by ${rows.length} values`;
  if (isTime) {
    const width = 640, height = 220, x = (i) => 50 + (i / Math.max(1, rows.length - 1)) * (width - 70);
    const y = (value) => 10 + ((high - value) / (high - low || 1)) * (height - 45);
    return html`<svg viewBox="0 0 ${width} ${height}" role="img" aria-label=${label}>
      <polyline class="line" points=${rows.map((row, i) => `${x(i)},${y(row[1])}`).join(" ")} />
      ${rows.map((row, i) => html`<circle class="dot" cx=${x(i)} cy=${y(row[1])} r="3"><title>${row[0]}: ${row[1]}</title></circle>`)}
      <text x="44" y=${y(high) + 4} text-anchor="end">${high}</text><text x="44" y=${y(low) + 4} text-anchor="end">${low}</text>
      <text x=${x(0)} y=${height - 6}>${rows[0][0]}</text>
      <text x=${x(rows.length - 1)} y=${height - 6} text-anchor="end">${rows[rows.length - 1][0]}</text></svg>`;
  }
  const width = 640, row = 26, left = 180, x = (value) => left + ((value - low) / (high - low || 1)) * (width - left - 80);
  return html`<svg viewBox="0 0 ${width} ${rows.length * row}" role="img" aria-label=${label}>
    ${rows.map(([name, value], i) => html`<text x=${left - 8} y=${i * row + 17} text-anchor="end">${name.slice(0, 22)}</text>
      <rect class="bar" x=${Math.min(x(0), x(value))} y=${i * row + 4} height=${row - 8} width=${Math.max(1, Math.abs(x(value) - x(0)))}>
      <title>${name}: ${value}</title></rect><text x=${Math.max(x(0), x(value)) + 6} y=${i * row + 17}>${value}</text>`)}</svg>`;
}

function download(result) {
  const quoted = (cell) => (/[",\r\n]/.test(cell) ? `"${cell.replaceAll('"', '""')}"` : cell);
  // A spreadsheet would run a text that begins like a formula, such as =HYPERLINK(..); numbers and +49 30 stay.
  const inert = (cell) => (typeof cell === "string" && /^[=@\t\r]|^[+-](?![\d., ]*$)/.test(cell) ? `'${cell}` : String(cell ?? ""));
  const lines = [result.columns, ...result.rows].map((row) => row.map((cell) => quoted(inert(cell))).join(","));
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([lines.join("\r\n")], { type: "text/csv" }));
  link.download = "result.csv";
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

function Answer({ question, sql, result, failure }) {
  const [text, setText] = useState(sql), [now, setNow] = useState(failure ? null : result), [note, setNote] = useState("");
  const chart = useMemo(() => now && chartOf(now), [now]);
  const attempt = (work) => work().catch((error) => setNote(error.message));
  const run = () => attempt(async () => { setNote("Running ..."); setNow(await (await call("api/run", { sql: text })).json()); setNote(""); });
  const judge = (right) => attempt(async () => {
    await call("api/feedback", { question, sql: text, right });
    setNote(right ? "Saved as right." : "Saved as wrong.");
  });
  return html`${failure && !now && html`<p class="wrong">${failure}. Edit the query and run it.</p>`}
    <label>SQL<textarea rows=${Math.min(12, text.split("\n").length + 1)} spellcheck="false" value=${text}
      onInput=${(event) => setText(event.target.value)}
      onKeyDown=${(event) => event.key === "Enter" && (event.ctrlKey || event.metaKey) && run()} /></label>
    <p class="actions"><button onClick=${run}>Run</button>
      <button onClick=${() => judge(true)}>Right</button><button onClick=${() => judge(false)}>Wrong</button>
      ${now && now.status === "ok" && now.rows.length > 0 && html`<button onClick=${() => download(now)}>CSV</button>`}
      <span class="note" role="status">${note}</span></p>
    ${now && html`<${Table} result=${now} />`}${chart && html`<${Chart} chart=${chart} />`}`;
}

function Exchange({ entry, again }) {
  const { question, looks, answer, error } = entry;
  return html`<article><h2>${question}</h2>
    ${looks.length > 0 && html`<details open=${!answer && !error}><summary>${looks.length} exploratory ${looks.length === 1 ? "query" : "queries"}</summary>
      ${looks.map((look) => html`<pre>${look.sql || look.error}</pre>${look.result && html`<${Table} result=${look.result} />`}`)}</details>`}
    ${answer && html`${!answer.is_sure && html`<p class="unsure">Not sure: ${Math.round(answer.confidence * 100)}% of the answers agree on this one.</p>`}
      <${Answer} question=${question} ...${answer} />
      ${answer.other && !answer.is_sure && html`<h3>Another reading</h3><${Answer} question=${question} ...${answer.other} />`}
      <p class="note">${answer.seconds} s${answer.confidence === null ? "" : `, ${Math.round(answer.confidence * 100)}% of the answers agree`}</p>`}
    ${error && html`<p class="wrong">${error}</p><p><button onClick=${again}>Ask again</button></p>`}
    ${!answer && !error && html`<p class="note" role="status">Working ...</p>`}</article>`;
}

function Page() {
  const [entries, setEntries] = useState([]), [about, setAbout] = useState(null), [text, setText] = useState("");
  const [failure, setFailure] = useState("");
  const isBusy = entries.some((entry) => !entry.answer && !entry.error);
  useEffect(() => { call("api/about").then((answer) => answer.json()).then(setAbout).catch((error) => setFailure(error.message)); }, []);
  async function ask(question) {
    if (!question.trim() || isBusy) return;
    const before = entries.filter((entry) => entry.answer);
    const entry = { id: Date.now(), question, looks: [] };
    const change = (fields) => { Object.assign(entry, fields); setEntries((all) => all.map((one) => (one.id === entry.id ? { ...entry } : one))); };
    setEntries((all) => [...all, entry]);
    setText("");
    try {
      const history = before.slice(-1).map((one) => ({ question: one.question, sql: one.answer.sql }));
      for await (const event of events(await call("api/ask", { question, history }))) {
        if (event.look) change({ looks: [...entry.looks, event.look] });
        else if (event.error) change({ error: event.error });
        else change({ answer: event.answer });
      }
      if (!entry.answer && !entry.error) change({ error: "The connection to the server broke." });
    } catch (error) {
      change({ error: error.message });
    }
  }
  return html`<header><h1>${about ? `${about.database}, answered by ${about.model}` : "Ask the database"}</h1></header>
    ${failure && html`<p class="wrong" role="alert">${failure}</p>`}
    ${entries.map((entry) => html`<${Exchange} key=${entry.id} entry=${entry} again=${() => ask(entry.question)} />`)}
    <form onSubmit=${(event) => { event.preventDefault(); ask(text); }}>
      <label for="question">Question</label>
      <input id="question" autocomplete="off" value=${text} maxlength="4000" autofocus onInput=${(event) => setText(event.target.value)} />
      <button disabled=${isBusy || !text.trim()}>Ask</button></form>
    ${about && html`<details><summary>Schema</summary><pre>${about.schema}</pre></details>`}
    <p class="note">Read-only. A question that begins with "and", "only" or "of those" follows the one before. Right and wrong answers go
      to feedback.jsonl.</p>`;
}

const page = document.getElementById("page");
page.replaceChildren();
render(html`<${Page} />`, page);
