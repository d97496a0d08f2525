// Sends the form as a job, follows its events, and shows the picture with what was planned and measured.
"use strict";
const $ = (id) => document.getElementById(id);
const headers = () => {
  const key = $("ask").elements.key;
  return key ? { Authorization: `Bearer ${key.value}` } : {};
};
let job = null;

const say = (text, failed = false) => {
  $("state").textContent = text;
  $("state").className = failed ? "error" : "";
};

// The answer as JSON; an error has the server's message.
async function asked(url, options = {}) {
  const answer = await fetch(url, { ...options, headers: { ...headers(), ...options.headers } });
  const body = await answer.json();
  if (!answer.ok) {
    const after = answer.headers.get("Retry-After");
    throw new Error(body.error.message + (after ? `; try again in ${after} s` : ""));
  }
  return body;
}

function shown(state) {
  if (state.state === "waiting") say(`waiting, about ${state.waits_seconds.toFixed(1)} s`);
  else if (state.state === "running") say(state.steps ? `${state.stage}: step ${state.step} of ${state.steps}` : "loading and encoding");
  $("bar").hidden = false;
  $("bar").value = state.steps ? state.step / state.steps : 0;
}

// Server-sent events, read by fetch: EventSource cannot send a key.
async function follow(id) {
  const answer = await fetch(`v1/jobs/${id}/events`, { headers: headers() });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let text = "", done = false; !done; ) {
    const chunk = await reader.read();
    done = chunk.done;
    text += chunk.value || "";
    const events = text.split("\n\n");
    text = events.pop();
    for (const event of events) {
      const [kind, data] = event.split("\n").map((line) => line.slice(line.indexOf(": ") + 2));
      if (kind === "preview") picture(data, "preview");
      else shown(JSON.parse(data));
      if (kind === "end") return JSON.parse(data);
    }
  }
  throw new Error("the server has closed the connection");
}

function picture(data, alt) {
  $("picture").src = `data:image/png;base64,${data}`;
  $("picture").alt = alt;
  $("picture").hidden = false;
}

function figures(of, predicted) {
  const mib = (bytes) => `${(bytes / 2 ** 20).toFixed(1)} MiB`;
  const seconds = (value) => `${value.toPrecision(3)} s`;
  const rows = [["queue", seconds(of.queue_seconds.planned), seconds(of.queue_seconds.measured)]];
  for (const stage of of.stages) rows.push([stage.name, seconds(stage.planned_seconds), seconds(stage.measured_seconds)]);
  rows.push(["peak memory", mib(of.peak_bytes.planned), mib(of.peak_bytes.measured)]);
  const body = $("figures").tBodies[0];
  body.replaceChildren();
  for (const row of rows) for (const [number, cell] of Object.entries(row)) {
    if (number === "0") body.insertRow();
    body.rows[body.rows.length - 1].insertCell().textContent = cell;
  }
  $("figures").hidden = false;
}

$("ask").addEventListener("submit", async (event) => {
  event.preventDefault();
  const form = $("ask").elements, body = { prompt: form.prompt.value, model: form.model.value, size: form.size.value };
  for (const name of ["seed", "steps"]) if (form[name].value) body[name] = Number(form[name].value);
  try {
    say("planning");
    job = await asked("v1/jobs", { method: "POST", body: JSON.stringify(body), headers: { "Content-Type": "application/json" } });
    $("stop").disabled = false;
    const end = await follow(job.id);
    if (end.error) throw new Error(end.error.message);
    const result = await asked(`v1/jobs/${job.id}/result`);
    picture(result.data[0].b64_json, body.prompt);
    figures(result.graphrun);
    const seed = result.data[0].seed;
    say(`done${seed === undefined ? "" : `, seed ${seed}`}; ${result.graphrun.verdict}`);
  } catch (error) {
    say(error.message, true);
  } finally {
    $("stop").disabled = true;
    $("bar").hidden = true;
  }
});

$("stop").addEventListener("click", () => job && asked(`v1/jobs/${job.id}`, { method: "DELETE" }).catch((error) => say(error.message, true)));
