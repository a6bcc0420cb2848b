"use strict";
const $ = (id) => document.getElementById(id);
const form = $("edit");
let questions = [], place = 0, shown = null, pending = 0, queue = Promise.resolve();

async function ask(path, body) {
  const options = body && { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
  let answer, record;
  try {
    answer = await fetch(path, options);
    record = await answer.json();
  } catch {
    throw new Error("The server does not answer: is `text2sql-grpo review` still running? Nothing was saved.");
  }
  if (!answer.ok) throw new Error(record.error);
  return record;
}

function element(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function table(result, label) {
  if (result.error) return [element("p", `The query fails: ${result.error}`, "wrong")];
  const box = element("div", undefined, "table"), made = element("table"), head = made.createTHead().insertRow();
  Object.assign(box, { tabIndex: 0, role: "region", ariaLabel: label });
  for (const name of result.columns) Object.assign(head.appendChild(element("th", name)), { scope: "col" });
  const body = made.createTBody();
  for (const row of result.rows) {
    const line = body.insertRow();
    for (const cell of row) line.appendChild(element("td", cell)).title = cell;
  }
  box.append(made);
  const count = result.total === "1" ? "1 row" : `${result.total} rows`;
  const cut = String(result.rows.length) === result.total ? count : `${count}, the first ${result.rows.length} shown`;
  return [box, element("p", cut, "note")];
}

function evidence(record) {
  const many = record.databases === 1 ? "1 test database" : `${record.databases} test databases`;
  const parts = [element("p", `${many} of this query${record.gap ? `. Gap: ${record.gap}` : ""}`, "note")];
  if (record.near) {
    const same = "returns the same rows on your database, and different rows on a test database:";
    const tells = record.near.is_same_here ? same : "is told apart by a test database:";
    const pair = element("div", undefined, "pair"), right = element("div"), near = element("div");
    right.append(element("p", "Rows of the query there", "note"), ...table(record.near.right, "Rows of the query there"));
    near.append(element("p", "Rows of the near query there", "note"), ...table(record.near.result, "Rows of the near query there"));
    pair.append(right, near);
    const sql = Object.assign(element("pre", record.near.sql), { tabIndex: 0, role: "region", ariaLabel: "Near wrong query" });
    parts.push(element("p", `A near wrong query ${tells}`, "note"), sql, pair);
  } else if (record.databases) {
    parts.push(element("p", "No near wrong query was found that they tell apart.", "note"));
  }
  return parts;
}

function fail(error) {
  $("alert").textContent = error.message;
  $("alert").hidden = false;
  $("alert").scrollIntoView({ block: "nearest" });
}

function say(text) { $("status").textContent = text; }

function count(state) {
  questions = state.questions;
  const done = questions.filter((one) => one.verdict).length;
  $("count").textContent = `${done} of ${questions.length}`;
  $("count").title = `reviewed by ${state.by}`;
  Object.assign($("progress"), { value: done, max: questions.length });
  return done;
}

async function show(to) {
  place = Math.max(0, Math.min(questions.length - 1, to));
  const id = questions[place].id, query = `id=${encodeURIComponent(id)}`;
  const record = await ask(`question?${query}`);
  shown = record;
  const verdict = record.verdict;
  $("place").textContent = `Question ${place + 1} of ${questions.length}`;
  $("about").textContent = `in ${record.database}, ${record.template}`;
  $("verdict").textContent = verdict ? `${verdict.verdict}, by ${verdict.verified_by}` : "";
  $("verdict").className = verdict ? verdict.verdict : "";
  $("question").textContent = record.question;
  $("sql").textContent = record.sql;
  $("rows").replaceChildren(...table(record.result, "Rows"));
  $("example").checked = Boolean(verdict && verdict.use_as_onboarding_question);
  $("previous").disabled = place === 0;
  $("next").disabled = place === questions.length - 1;
  $("alert").hidden = true;
  $("card").hidden = false;
  toggle(false);
  if (document.activeElement !== $("example")) {
    window.scrollTo(0, 0);
    $("question").focus({ preventScroll: true });
  }
  $("evidence").replaceChildren(element("p", "Searching …", "note"));
  ask(`evidence?${query}`).then(
    (found) => shown === record && $("evidence").replaceChildren(...evidence(found)),
    (error) => shown === record && $("evidence").replaceChildren(element("p", error.message, "wrong")),
  ).then(() => { // the next one is searched while this one is read
    const next = questions[place + 1];
    if (shown === record && next) ask(`evidence?id=${encodeURIComponent(next.id)}`).catch(() => {});
  });
}

function toggle(isOpen) {
  form.hidden = !isOpen;
  $("sql").hidden = $("question").hidden = isOpen;
  $("actions").hidden = isOpen;
  if (!isOpen) return;
  form.question.value = shown.question;
  form.sql.value = shown.sql;
  form.phrasings.value = (shown.verdict ? shown.verdict.phrasings : []).join("\n");
  form.question.focus();
}

const isDirty = () => shown && !form.hidden && (form.question.value !== shown.question || form.sql.value !== shown.sql);

async function judge(verdict, edited = {}, isStaying = false) {
  const id = shown.id, known = shown.verdict ? shown.verdict.phrasings : [];
  const body = { id, verdict, question: shown.question, sql: shown.sql, phrasings: known, as_example: $("example").checked };
  const done = count(await ask("verdict", { ...body, ...edited }));
  const saved = questions.find((one) => one.id === id).verdict;
  const open = questions.findIndex((one, index) => index > place && !one.verdict);
  const any = open < 0 ? questions.findIndex((one) => !one.verdict) : open;
  await show(isStaying || any < 0 ? place : any);
  const end = "All are reviewed: Ctrl-C in the terminal shows the summary.";
  say(`Saved: ${saved}. ${any < 0 ? end : `${done} of ${questions.length} reviewed.`}`);
}

// Actions run one after the other. A verdict given while one runs is dropped: it would judge an unseen question.
function run(action, isVerdict = false) {
  if (isVerdict && (pending || !shown)) return;
  pending += 1;
  queue = queue.then(action).catch(fail).finally(() => { pending -= 1; });
}

const save = () => run(() => judge("edit", {
  question: form.question.value, sql: form.sql.value, phrasings: form.phrasings.value.split("\n"),
}, true), true);
const verdicts = { r: () => judge("right"), w: () => judge("wrong"), s: () => judge("skip"), x: () => $("example").click() };
const keys = { e: () => toggle(true), j: () => show(place + 1), k: () => show(place - 1), "?": () => $("help").showModal() };

document.addEventListener("keydown", (event) => {
  if (event.altKey || event.metaKey || event.isComposing || $("help").open) return;
  if (!form.hidden) {
    if (event.key === "Escape") $("cancel").click();
    if (event.key === "Enter" && event.ctrlKey) save();
  } else if ((keys[event.key] || verdicts[event.key]) && !event.ctrlKey && !event.repeat) {
    event.preventDefault();
    run(keys[event.key] || verdicts[event.key], event.key in verdicts);
  }
});
for (const button of document.querySelectorAll("[data-verdict]")) {
  button.addEventListener("click", () => run(() => judge(button.dataset.verdict), true));
}
for (const [id, key] of [["open", "e"], ["next", "j"], ["previous", "k"], ["keys", "?"]]) {
  $(id).addEventListener("click", () => run(keys[key]));
}
$("cancel").addEventListener("click", () => run(() => { toggle(false); $("open").focus(); }));
$("example").addEventListener("change", () => {
  if (form.hidden && shown.verdict && shown.verdict.verdict !== "skip") run(() => judge(shown.verdict.verdict, {}, true));
});
form.addEventListener("submit", (event) => { event.preventDefault(); save(); });
window.addEventListener("beforeunload", (event) => { if (isDirty()) event.preventDefault(); });

run(async () => {
  const done = count(await ask("state"));
  await show(questions.findIndex((one) => !one.verdict));
  say(`${done} of ${questions.length} reviewed.`);
});
