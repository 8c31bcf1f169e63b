"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const follow = document.getElementById("page-script").dataset.follow;
  const KIND_COLOURS = {
    rollout: "#3b82c4", reward: "#e0a030", evaluation: "#8fb4d8", train: "#2f9e6e", "optimizer step": "#176043",
    publish: "#b45fa8", pause: "#d1495b", prefetch: "#cf9fc8", "engine start": "#8a8f98", drain: "#b9a27a",
    "not finished": "#7a5cc0", compilation: "#a8b820", aside: "#6f8f8a", other: "#9a9a9a", idle: "#b8bdc4",
  };
  const LEGEND_TEXTS = { idle: "learner without work", pause: "generation paused", prefetch: "weights fetched ahead", "not finished": "begun, not finished", compilation: "compiled, then trained", aside: "saves, probes, hands weights over, waits for them" };
  const ALPHAS = { idle: 0.35, pause: 0.8, "not finished": 0.45 };
  const at = (id) => document.getElementById(id);

  function make(tag, text, className) {
    const element = document.createElement(tag);
    if (text !== undefined) element.textContent = text;  // never markup: it is what others wrote
    if (className) element.className = className;
    return element;
  }

  function option(select, value, text) {
    const made = make("option", text);
    made.value = value;
    select.append(made);
  }

  const number = (value, digits = 3) =>
    value === null || value === undefined ? "-" : Number(value.toPrecision(digits)).toString();

  // What was chosen, opened and zoomed outlives a reload, as of a page that follows a run; not a page opened anew.
  const memory = {
    key: `sluice ${document.title}`,
    kept: {},
    read() {
      if (performance.getEntriesByType("navigation")[0]?.type !== "reload") return;
      try { this.kept = JSON.parse(sessionStorage.getItem(this.key)) || {}; } catch { /* forbidden, or not ours */ }
    },
    write(values) { try { sessionStorage.setItem(this.key, JSON.stringify(values)); } catch { /* forbidden, or full */ } },
  };

  // ---- figures in the colours of the page

  function colours() {
    const style = getComputedStyle(document.documentElement);
    return Object.fromEntries(["ink", "soft", "line", "page"].map((n) => [n, style.getPropertyValue(`--${n}`).trim()]));
  }

  function paint(figure) {
    const c = colours();
    for (const part of [...figure.below, ...figure.left, ...figure.above, ...figure.right, ...figure.center]) {
      if (part.type.endsWith("Axis")) {
        part.setv({
          axis_label_text_color: c.soft, major_label_text_color: c.soft, axis_line_color: c.line,
          major_tick_line_color: c.line, minor_tick_line_color: null, axis_label_text_font_style: "normal",
          axis_label_text_font_size: "12px", major_label_text_font_size: "11px",
        });
      } else if (part.type === "Grid") {
        part.setv({ grid_line_color: c.line });
      }
    }
  }

  // ---- what the curves are drawn over

  function axis() { return data.axes.find((a) => a.name === at("over")?.value) || data.axes[0]; }

  function drawOver() {
    const chosen = axis(), width = chosen.largest;
    for (const name of data.sources) {
      const source = model(name);
      source.data = { ...source.data, x: source.data[chosen.name] };
    }
    for (const figure of figures()) if (figure.name.startsWith("figure-")) figure.below[0].axis_label = chosen.label;
    const whole = { start: -0.01 * width, end: 1.01 * width };
    model("over")?.setv({ bounds: [-0.05 * width, 1.05 * width] });  // first: a start and an end beyond them are clipped
    model("over")?.setv({ ...whole, reset_start: whole.start, reset_end: whole.end });
  }

  function startAxes() {
    if (!at("over")) return;
    data.axes.forEach((a) => option(at("over"), a.name, a.title));
    at("over-label").hidden = data.axes.length < 2;
    at("over").addEventListener("change", drawOver);
    if (data.axes.some((a) => a.name === memory.kept.over)) at("over").value = memory.kept.over;
    if (axis() !== data.axes[0]) drawOver();
    zoom(model("over"), memory.kept.zoom);
  }

  const zoomed = (range) => range && (range.start !== range.reset_start || range.end !== range.reset_end) ? [range.start, range.end] : null;

  function zoom(range, kept) { if (range && kept) range.setv({ start: kept[0], end: kept[1] }); }

  const figures = () => Bokeh.documents.flatMap((d) => d.roots());
  const model = (name) => Bokeh.documents.map((d) => d.get_model_by_name(name)).find((m) => m);

  // ---- legends: an entry hides and shows what it names

  function turn(key) {
    key.setAttribute("aria-pressed", key.getAttribute("aria-pressed") !== "true");
    const figure = model(key.dataset.figure);
    const hidden = [...document.querySelectorAll(`button.key[data-figure="${key.dataset.figure}"][aria-pressed=false]`)];
    const isHidden = ([run, line]) => hidden.some((k) => (!k.dataset.run || k.dataset.run === run) && (!k.dataset.line || k.dataset.line === line));
    for (const part of [...figure.renderers, ...figure.center]) if (part.name) part.visible = !isHidden(part.name.split("/"));
  }

  // By its words: a figure that is drawn later may have taken its number.
  const wordsOf = (key) => `${key.closest("figure").querySelector("h3").textContent}/${key.textContent}`;

  function startKeys() {
    document.querySelectorAll("button.key").forEach((key) => {
      key.addEventListener("click", () => turn(key));
      if (memory.kept.hidden?.includes(wordsOf(key))) turn(key);
    });
  }

  // ---- the timeline of a round

  const timeline = { run: 0, round: 0 };

  function rounds() { return data.runs[timeline.run].rounds; }

  function fillRounds() {
    const select = at("round-number");
    select.replaceChildren();
    rounds().forEach((r, i) => option(select, i, `${r.number} (${stepsOf(r)}, ${number(r.seconds)} s)`));
  }

  function stepsOf(r) {
    const steps = r.steps[1] < r.steps[0] ? "no update" : `updates ${r.steps[0]}-${r.steps[1]}`;
    return r.open ? `not finished: ${steps} yet` : steps;
  }

  function showRound() {
    const r = rounds()[timeline.round];
    const under = at("timeline-under"), run = data.runs[timeline.run];
    at("round-before").disabled = timeline.round <= 0;
    at("round-after").disabled = timeline.round >= rounds().length - 1;
    if (!r) {
      at("timeline").hidden = at("timeline-legend").hidden = true;
      under.textContent = "There is no round in the event log.";
      at("round-facts").textContent = "";
      return;
    }
    at("timeline").hidden = at("timeline-legend").hidden = false;
    at("round-number").value = timeline.round;
    const facts = [r.open ? `not finished; ${number(r.seconds)} s until the last event` : `${number(r.seconds)} s`];
    if (r.dispatch !== undefined) facts.push(`first U groups after ${number(r.dispatch)} s`);
    if (r.compute !== undefined) facts.push(`learner computed ${number(r.compute)} s, waited ${number(r.wait)} s`);
    if (r.waiting !== undefined) facts.push(`waiting ratio ${number(r.waiting)} (eq. 4: ${number(r.waiting_eq4)})`);
    at("round-facts").textContent = facts.join("; ");
    const notes = [];
    if (rounds().length < run.num_rounds) notes.push(`${rounds().length} of ${run.num_rounds} rounds are in this report: as many as there is room for: the first, the last, the slowest and some between.`);
    if (r.left_out) notes.push(`${r.left_out} short spans of this round are left out.`);
    if (r.open) notes.push("It is under way, hangs, or was cut off: it is drawn until the last event of any process, and what was begun and has not ended until its process's.");
    notes.push("Drag to zoom; what a bar is, is told under the pointer. Where a track is shaded its process lived, by its events.");
    under.textContent = notes.join(" ");
    draw(r);
  }

  function draw(r) {
    const figure = model("timeline");
    if (!figure) return;
    const [start, end, top, bottom, kind, text] = r.spans;
    const names = kind.map((k) => data.kinds[k]);
    const total = r.tracks.length ? r.tracks[r.tracks.length - 1].y1 : 1;
    model("timeline-spans").data = {
      left: start, right: end, top, bottom, text, seconds: start.map((s, i) => end[i] - s),
      colour: names.map((n) => KIND_COLOURS[n]), alpha: names.map((n) => ALPHAS[n] || 0.95),
    };
    const lives = r.tracks.flatMap((t) => t.alive.map(([from, to]) => ({ from, to, top: t.y0, bottom: t.y1 })));
    model("timeline-tracks").data = {
      left: lives.map((l) => l.from), right: lives.map((l) => l.to), top: lives.map((l) => l.top), bottom: lives.map((l) => l.bottom),
    };
    model("timeline-marks").data = { x: r.marks[0], y: r.marks[1], text: r.marks[2] };
    const dispatch = model("timeline-dispatch");
    dispatch.setv({ line_color: colours().ink, location: r.dispatch === undefined ? 0 : r.dispatch, visible: r.dispatch !== undefined });
    const axis = figure.left[0];
    const centres = r.tracks.map((t) => (t.y0 + t.y1) / 2);
    axis.ticker.ticks = centres;
    axis.major_label_overrides = new Map(r.tracks.map((t, i) => [centres[i], t.name]));
    figure.y_range.setv({ start: total + 0.1, end: -0.1, reset_start: total + 0.1, reset_end: -0.1 });
    const margin = 0.04 * r.seconds;
    figure.x_range.setv({ start: -margin, end: r.seconds + margin, reset_start: -margin, reset_end: r.seconds + margin });
    figure.height = Math.round(Math.min(900, 80 + 36 * total));
    const present = new Set(names);
    at("timeline-legend").replaceChildren(...data.kinds.filter((k) => present.has(k)).map((k) => {
      const entry = make("span", LEGEND_TEXTS[k] || k), swatch = make("i");
      swatch.style.background = KIND_COLOURS[k];
      entry.prepend(swatch);
      return entry;
    }));
    if (r.dispatch !== undefined) at("timeline-legend").append(make("span", "dashed: the first U groups are there"));
    at("timeline").dataset.tracks = JSON.stringify(r.tracks.map((t) => t.name));
    at("timeline").setAttribute("aria-label", `Timeline of round ${r.number}: ${r.tracks.map((t) => t.name).join(", ")}`);
  }

  function chooseRound(i) {
    timeline.round = Math.max(0, Math.min(rounds().length - 1, i));
    showRound();
  }

  function startTimeline() {
    data.runs.forEach((run, i) => option(at("round-run"), i, run.label));
    at("round-run-label").hidden = data.runs.length < 2;
    const kept = memory.kept;
    timeline.run = Math.max(0, data.runs.findIndex((run) => run.label === kept.roundRun));
    at("round-run").value = timeline.run;
    fillRounds();
    const found = rounds().findIndex((r) => r.begin === kept.round);
    timeline.round = found < 0 ? Math.max(0, rounds().length - 1) : found;
    at("round-run").addEventListener("change", (e) => { timeline.run = Number(e.target.value); fillRounds(); chooseRound(rounds().length - 1); });
    at("round-number").addEventListener("change", (e) => chooseRound(Number(e.target.value)));
    at("round-before").addEventListener("click", () => chooseRound(timeline.round - 1));
    at("round-after").addEventListener("click", () => chooseRound(timeline.round + 1));
    at("round-whole").addEventListener("click", showRound);
    showRound();
    if (found >= 0) zoom(model("timeline")?.x_range, kept.roundZoom);
  }

  // ---- samples

  const PAGE = 20;
  const samples = { all: [], found: [], shown: 0, query: "" };

  function flatten() {
    data.runs.forEach((run, r) => run.samples.forEach((group) => group.responses.forEach((response) => {
      samples.all.push({ run: r, group, response, text: [group.prompt, group.answer, group.about, group.source, group.set, group.ticket, group.problem, response.actor, response.finish, ...response.parts.map((p) => p[1])].join("\n").toLowerCase() });
    })));
  }

  const KEYS = {
    step: (s) => s.group.step, first: (s) => -s.group.step,
    reward: (s) => s.response.reward ?? -Infinity, worst: (s) => -(s.response.reward ?? Infinity),
    lag: (s) => s.response.lag ?? -1, length: (s) => s.response.tokens,
    advantage: (s) => s.response.advantage ?? -Infinity,
  };

  function findSamples() {
    const query = at("sample-search").value.trim().toLowerCase();
    const kind = at("sample-kind").value, run = at("sample-run").value;
    const from = at("sample-from").value === "" ? -Infinity : Number(at("sample-from").value);
    const to = at("sample-to").value === "" ? Infinity : Number(at("sample-to").value);
    const key = KEYS[at("sample-sort").value];
    samples.query = query;
    samples.found = samples.all.filter((s) =>
      (!query || s.text.includes(query)) && (!kind || s.group.kind === kind) && (run === "" || s.run === Number(run)) &&
      s.group.step >= from && s.group.step <= to);
    samples.found.sort((a, b) => key(b) - key(a));
    samples.shown = 0;
    at("sample-list").replaceChildren();
    at("sample-count").textContent = samples.all.length
      ? `${samples.found.length.toLocaleString("en")} of ${samples.all.length.toLocaleString("en")} responses.`
      : "No samples: samples.jsonl is empty or not there.";
    moreSamples();
  }

  function moreSamples() {
    const next = samples.found.slice(samples.shown, samples.shown + PAGE);
    next.forEach((sample, i) => {
      const before = samples.found[samples.shown + i - 1];
      at("sample-list").append(card(sample, before !== undefined && before.group === sample.group));
    });
    samples.shown += next.length;
    at("sample-more").hidden = samples.shown >= samples.found.length;
    at("sample-more").textContent = `more (${(samples.found.length - samples.shown).toLocaleString("en")})`;
  }

  function marked(text, className) {
    const block = make("pre", undefined, className);
    const query = samples.query, lower = text.toLowerCase();
    let from = 0;
    for (let i = query && lower.length === text.length ? lower.indexOf(query) : -1; i >= 0; i = lower.indexOf(query, from)) {
      block.append(text.slice(from, i), make("mark", text.slice(i, i + query.length)));
      from = i + query.length;
    }
    block.append(text.slice(from));
    return block;
  }

  function card(sample, goesOn) {
    const { group, response } = sample;
    const box = make("article", undefined, goesOn ? "sample goes-on" : "sample"), top = make("div", undefined, "top"), body = make("div", undefined, "body");
    const where = group.kind === "eval" ? `evaluation${group.set ? ` of ${group.set}` : ""}` : `round ${group.round}`;
    if (data.runs.length > 1) top.append(make("b", data.runs[sample.run].label));
    top.append(make("b", `step ${group.step}`), make("span", where));
    if (group.source) top.append(make("span", group.source));
    top.append(make("b", `reward ${number(response.reward)}`, response.reward > 0 ? "good" : "bad"));
    const scores = (response.scores || []).map(([name, value, verdict]) => `${name} ${number(value)} ${verdict}`);
    for (const fact of [...scores, ...factsOf(response)]) top.append(make("span", fact, "facts"));
    if (group.responses.length > 1) {
      const siblings = make("button", `its group of ${group.of || group.responses.length}`, "link");
      siblings.type = "button";
      siblings.addEventListener("click", () => { at("sample-search").value = group.ticket; at("sample-kind").value = group.kind; at("sample-run").value = sample.run; at("sample-from").value = at("sample-to").value = ""; findSamples(); });
      top.append(siblings);
    }
    if (!goesOn) body.append(make("h4", "prompt"), marked(group.prompt));
    if (group.answer && !goesOn) body.append(make("h4", "wanted"), marked(group.answer));
    for (const [byPolicy, text] of response.parts) {
      if (!goesOn || response.parts.length > 1) body.append(make("h4", byPolicy ? "response" : "environment"));
      body.append(marked(text, byPolicy ? "" : "observed"));
    }
    if (response.left_out) body.append(make("p", `${response.left_out} turns between are not kept`, "soft"));
    const about = [`ticket ${group.ticket}`, `problem ${group.problem}`, group.environment && `environment ${group.environment}`].filter(Boolean);
    if (!goesOn) {
      const more = make("details", undefined, "soft");
      more.dataset.of = `sample ${sample.run} ${group.kind} ${group.step} ${group.ticket}`;
      more.append(make("summary", about.join(" · ")), make("p", group.about || "The row says nothing besides."));
      body.append(more);
    }
    box.append(top, body);
    return box;
  }

  function factsOf(r) {
    const facts = [];
    if (r.turn_rewards) facts.push(`by turn ${r.turn_rewards.map((v) => number(v)).join(" ")}`);
    if (r.advantage !== undefined) facts.push(`advantage ${number(r.advantage)}`);
    if (r.turn_advantages) facts.push(`by turn ${r.turn_advantages.map((v) => number(v)).join(" ")}`);
    if (r.lag !== undefined) facts.push(`lag ${number(r.lag)}${r.lag_max === undefined ? "" : `, oldest token ${r.lag_max}`}`);
    if (r.versions && r.versions[0] !== null) facts.push(`weights ${r.versions[0] === r.versions[1] ? r.versions[0] : r.versions.join("-")}`);
    facts.push(`${r.tokens} tokens`);
    if (r.observed) facts.push(`${r.observed} observed`);
    if (r.finish) facts.push(`finish ${r.finish}`);
    if (r.actor) facts.push(r.actor);
    return facts;
  }

  function startSamples() {
    flatten();
    option(at("sample-run"), "", "all");
    data.runs.forEach((run, i) => option(at("sample-run"), i, run.label));
    at("sample-run-label").hidden = data.runs.length < 2;
    const kept = memory.kept;
    for (const [name, value] of Object.entries(kept.samples || {})) at(`sample-${name}`).value = value;
    let timer;
    at("sample-search").addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(findSamples, 150); });
    for (const id of ["sample-run", "sample-kind", "sample-sort", "sample-from", "sample-to"]) at(id).addEventListener("change", findSamples);
    at("sample-more").addEventListener("click", moreSamples);
    findSamples();
    while (samples.shown < Math.min(kept.samplesShown || 0, samples.found.length)) moreSamples();
  }

  // ---- a page that is served

  // A page that somebody reads stays as it is until they ask for the next one, which then keeps their place.
  let isTouched = false;

  function remember() {
    const section = [...document.querySelectorAll("section")].findLast((s) => s.getBoundingClientRect().top <= 80);
    const shown = rounds()[timeline.round], isLast = timeline.round >= rounds().length - 1, roundZoom = zoomed(model("timeline")?.x_range);
    memory.write({
      isTouched, over: axis().name, zoom: zoomed(model("over")),
      hidden: [...document.querySelectorAll("button.key[aria-pressed=false]")].map(wordsOf),
      roundRun: data.runs[timeline.run].label, round: isLast && !roundZoom ? null : shown?.begin, roundZoom,
      samples: Object.fromEntries(["search", "run", "kind", "sort", "from", "to"].map((n) => [n, at(`sample-${n}`).value])),
      samplesShown: samples.shown,
      opened: [...document.querySelectorAll("details[open]")].map((d) => d.dataset.of),
      place: scrollY > 0 && section ? [section.id, section.getBoundingClientRect().top] : null,
    });
  }

  function restore() {
    const { opened, place } = memory.kept;
    document.querySelectorAll("details").forEach((d) => { d.open = Boolean(opened?.includes(d.dataset.of)); });
    if (place && at(place[0])) scrollBy({ top: at(place[0]).getBoundingClientRect().top - place[1], behavior: "instant" });
  }

  async function look() {
    let said = "";
    try {
      const answer = await fetch("/version", { cache: "no-store" });
      if (answer.ok && (await answer.text()) !== follow) {
        if (!isTouched && scrollY === 0) { location.reload(); return; }
        at("more-of-run").hidden = false;
      }
    } catch { said = ": its server is gone"; }
    at("following").textContent = said;
    setTimeout(look, 5000);
  }

  function startFollowing() {
    isTouched = Boolean(memory.kept.isTouched);
    for (const kind of ["pointerdown", "keydown", "input", "wheel", "touchstart"]) {
      addEventListener(kind, () => { isTouched = true; }, { capture: true, passive: true });
    }
    at("show-more-of-run").addEventListener("click", () => location.reload());
    setTimeout(look, 5000);
  }

  function whenDrawn(then, tries = 0) {
    if (figures().length >= document.querySelectorAll("[data-root-id]").length || tries > 200) then();
    else setTimeout(() => whenDrawn(then, tries + 1), 25);
  }

  memory.read();
  history.scrollRestoration = "manual";
  startSamples();
  whenDrawn(() => {
    figures().forEach(paint);
    startTimeline();
    startAxes();
    startKeys();
    restore();
    addEventListener("pagehide", remember);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => figures().forEach(paint));
    document.documentElement.dataset.drawn = "yes";  // for who waits for it
  });
  if (follow) startFollowing();
})();
