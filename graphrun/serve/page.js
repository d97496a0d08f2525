// Sends the form as a job, follows its events, and adds the pictures to the gallery of this visit.
"use strict";
const $ = (id) => document.getElementById(id);
const fields = $("ask").elements;
const headers = () => (fields.key ? { Authorization: `Bearer ${fields.key.value}` } : {});
let job = null;

const say = (text, failed = false) => {
  $("state").textContent = text;
  $("state").className = failed ? "error" : "";
};

function duration(seconds) {
  if (seconds < 1) return `${Math.round(1000 * seconds)} ms`;
  if (seconds < 100) return `${seconds.toPrecision(2)} s`;
  return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
}

const size = (bytes) => (bytes < 2 ** 30 ? `${(bytes / 2 ** 20).toFixed(1)} MiB` : `${(bytes / 2 ** 30).toFixed(2)} GiB`);

// Shows the fields that the chosen model takes.
function adapt() {
  const takes = fields.model.selectedOptions[0].dataset;
  for (const part of document.querySelectorAll("[data-for]")) {
    part.hidden = !(part.dataset.for in takes);
    part.querySelector("input, textarea").disabled = part.hidden;
  }
  fields.image.required = "needs" in takes;
}

// The answer; an error has the server's message.
async function asked(url, options = {}) {
  const answer = await fetch(url, { ...options, headers: { ...headers(), ...options.headers } });
  if (answer.ok) return answer;
  const after = answer.headers.get("Retry-After");
  throw new Error((await answer.json()).error.message + (after ? `; try again in ${duration(Number(after))}` : ""));
}

function shown(state) {
  if (state.state === "waiting") say(`waiting, about ${duration(state.waits_seconds)}`);
  else if (state.state === "running") say(state.steps ? `${state.stage}: step ${state.step} of ${state.steps}` : "loading and encoding");
  $("bar").hidden = false;
  $("bar").value = state.steps ? state.step / state.steps : 0;
}

// Server-sent events, read by fetch: EventSource cannot send a key.
async function follow(id) {
  const answer = await asked(`v1/jobs/${id}/events`);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let text = "", done = false; !done; ) {
    const chunk = await reader.read();
    done = chunk.done;
    text += chunk.value || "";
    const events = text.split("\n\n");
    text = events.pop();
    for (const event of events) {
      const [kind, data] = event.split("\n").map((line) => line.slice(line.indexOf(": ") + 2));
      if (kind === "preview") preview(data);
      else shown(JSON.parse(data));
      if (kind === "end") return JSON.parse(data);
    }
  }
  throw new Error("the server has closed the connection");
}

function preview(data) {
  $("preview").hidden = !data;
  if (data) $("preview").firstElementChild.src = `data:image/png;base64,${data}`;
}

function add(source, name, prompt, text, isVideo) {
  const figure = document.createElement("figure"), caption = document.createElement("figcaption");
  const view = document.createElement(isVideo ? "video" : "img"), link = document.createElement("a");
  view.src = link.href = source;
  if (isVideo) Object.assign(view, { controls: true, loop: true });
  else view.alt = prompt;
  Object.assign(link, { download: name, textContent: "Download" });
  caption.append(`${prompt} (${text}) `, link);
  figure.append(view, caption);
  $("gallery").prepend(figure);
}

function figures(of) {
  const rows = [["queue", of.queue_seconds.planned, of.queue_seconds.measured, duration]];
  for (const stage of of.stages) rows.push([stage.name, stage.planned_seconds, stage.measured_seconds, duration]);
  rows.push(["peak memory", of.peak_bytes.planned, of.peak_bytes.measured, size]);
  const body = $("figures").tBodies[0];
  body.replaceChildren();
  for (const [name, planned, measured, text] of rows) {
    const row = body.insertRow();
    for (const cell of [name, text(planned), text(measured)]) row.insertCell().textContent = cell;
  }
  $("figures").hidden = false;
}

function body(isVideo) {
  const form = new FormData();
  for (const name of ["prompt", "negative_prompt", "model", "size", "n", "seed", "steps", "seconds"]) {
    if (!fields[name].disabled && fields[name].value) form.append(name, fields[name].value);
  }
  const [file] = fields.image.disabled ? [] : fields.image.files;
  if (file) form.append(isVideo ? "input_reference" : "image", file);
  return form;
}

$("ask").addEventListener("submit", async (event) => {
  event.preventDefault();
  const prompt = fields.prompt.value, isVideo = "videos" in fields.model.selectedOptions[0].dataset;
  preview(null);
  $("figures").hidden = true;
  $("make").disabled = true;
  try {
    say("planning");
    job = await (await asked(isVideo ? "v1/videos" : "v1/jobs", { method: "POST", body: body(isVideo) })).json();
    $("stop").disabled = false;
    const end = await follow(job.id);
    if (end.error) throw new Error(end.error.message);
    let figuresOf;
    if (isVideo) {
      const file = await (await asked(`v1/videos/${job.id}/content`)).blob();
      const video = await (await asked(`v1/videos/${job.id}`)).json();
      figuresOf = video.graphrun;
      add(URL.createObjectURL(file), `${job.id}.mp4`, prompt, video.model, true);
    } else {
      const result = await (await asked(`v1/jobs/${job.id}/result`)).json();
      figuresOf = result.graphrun;
      for (const [number, { b64_json, seed }] of [...result.data.entries()].reverse()) {
        const text = seed === undefined ? fields.model.value : `seed ${seed}`;
        add(`data:image/png;base64,${b64_json}`, `${job.id}-${number + 1}.png`, prompt, text, false);
      }
    }
    figures(figuresOf);
    say(`done; ${figuresOf.verdict}`);
  } catch (error) {
    say(error.message, true);
  } finally {
    preview(null);
    $("make").disabled = false;
    $("stop").disabled = true;
    $("bar").hidden = true;
  }
});

$("stop").addEventListener("click", () => job && asked(`v1/jobs/${job.id}`, { method: "DELETE" }).catch((error) => say(error.message, true)));
fields.model.addEventListener("change", adapt);
adapt();
