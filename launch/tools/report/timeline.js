  // Timeline of a round.

  const KIND_COLOURS = {
    rollout: "#3b82c4", reward: "#e0a030", evaluation: "#8fb4d8", train: "#2f9e6e", "optimizer step": "#176043",
    publish: "#b45fa8", pause: "#d1495b", prefetch: "#cf9fc8", "engine start": "#8a8f98", drain: "#b9a27a",
    "not finished": "#7a5cc0", compilation: "#a8b820", aside: "#6f8f8a", other: "#9a9a9a", idle: "#b8bdc4",
  };
  const LEGEND_TEXTS = { idle: "learner idle", pause: "generation paused", prefetch: "weight prefetch", "not finished": "unfinished", compilation: "compilation and training", aside: "checkpoint, probe, weight transfer" };
  const ALPHAS = { idle: 0.35, pause: 0.8, "not finished": 0.45 };

  const timeline = { run: 0, round: 0 };

  function rounds() { return data.runs[timeline.run].rounds; }

  function fillRounds() {
    const select = at("round-number");
    select.replaceChildren();
    rounds().forEach((r, i) => option(select, i, `${r.number} (${stepsOf(r)}, ${number(r.seconds)} s)`));
  }

  function stepsOf(r) {
    const steps = r.steps[1] < r.steps[0] ? "no update" : `updates ${r.steps[0]}-${r.steps[1]}`;
    return r.open ? `unfinished, ${steps}` : steps;
  }

  function showRound() {
    const r = rounds()[timeline.round];
    const under = at("timeline-under"), run = data.runs[timeline.run];
    at("round-before").disabled = timeline.round <= 0;
    at("round-after").disabled = timeline.round >= rounds().length - 1;
    if (!r) {
      at("timeline").hidden = at("timeline-legend").hidden = true;
      under.textContent = "No timeline: the events of this run contain no round.";
      at("round-facts").textContent = "";
      return;
    }
    at("timeline").hidden = at("timeline-legend").hidden = false;
    at("round-number").value = timeline.round;
    const facts = [r.open ? `unfinished, ${number(r.seconds)} s until the last event` : `${number(r.seconds)} s`];
    if (r.dispatch !== undefined) facts.push(`first U groups complete after ${number(r.dispatch)} s`);
    if (r.compute !== undefined) facts.push(`learner compute ${number(r.compute)} s, wait ${number(r.wait)} s`);
    if (r.waiting !== undefined) facts.push(`waiting ratio ${number(r.waiting)} (eq. 4: ${number(r.waiting_eq4)})`);
    at("round-facts").textContent = facts.join("; ");
    const notes = [];
    if (rounds().length < run.num_rounds) notes.push(`This report contains ${rounds().length} of ${run.num_rounds} rounds: the first, the last, the slowest, and others evenly over the run.`);
    if (r.left_out) notes.push(`${r.left_out} short spans of this round are omitted.`);
    if (r.open) notes.push("The round is unfinished: it is running, hung or interrupted. The timeline ends at the last event of any process, and unfinished spans at the last event of their process.");
    notes.push("Drag to zoom. Point at a bar for its description. A track is shaded while its process is alive.");
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
    if (r.dispatch !== undefined) at("timeline-legend").append(make("span", "dashed line: the first U groups are complete"));
    at("timeline").dataset.tracks = JSON.stringify(r.tracks.map((t) => t.name));
    at("timeline").setAttribute("aria-label", `Timeline of round ${r.number}: ${r.tracks.map((t) => t.name).join(", ")}`);
  }

  function chooseRound(i) {
    timeline.round = Math.max(0, Math.min(rounds().length - 1, i));
    setView("timeline", timeline.run, 0);
    setView("round", timeline.round < rounds().length - 1 ? rounds()[timeline.round].number : "");  // the last stays the last
    showRound();
  }

  function startTimeline() {
    data.runs.forEach((run, i) => option(at("round-run"), i, run.label));
    at("round-run-label").hidden = data.runs.length < 2;
    timeline.run = Math.min(data.runs.length - 1, Math.max(0, Number(inView("timeline", 0)) || 0));
    at("round-run").value = timeline.run;
    fillRounds();
    const kept = memory.kept, wanted = kept.lastRound ?? inView("round");
    const found = wanted === "" ? -1 : rounds().findIndex((r) => r.number === Number(wanted));
    timeline.round = found < 0 ? Math.max(0, rounds().length - 1) : found;
    at("round-run").addEventListener("change", (e) => { timeline.run = Number(e.target.value); fillRounds(); chooseRound(rounds().length - 1); });
    at("round-number").addEventListener("change", (e) => chooseRound(Number(e.target.value)));
    at("round-before").addEventListener("click", () => chooseRound(timeline.round - 1));
    at("round-after").addEventListener("click", () => chooseRound(timeline.round + 1));
    at("round-whole").addEventListener("click", showRound);
    showRound();
    if (wanted !== "" && found >= 0) zoom(model("timeline")?.x_range, kept.roundZoom);
  }
