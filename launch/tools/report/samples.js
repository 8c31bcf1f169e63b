  // Samples: search, filters, cards.

  const PAGE = 20;
  const samples = { all: [], found: [], shown: 0, query: "" };

  function flatten() {
    data.runs.forEach((run, r) => run.samples.forEach((group) => group.responses.forEach((response) => {
      samples.all.push({ run: r, group, response, text: [group.prompt, group.answer, group.about, group.source, group.set, group.ticket, group.problem, response.actor, response.finish, ...response.parts.map((p) => p[1])].join("\n").toLowerCase() });
    })));
  }

  const FIELDS = ["search", "run", "kind", "sort", "from", "to"];

  function showSamples(values) {
    for (const name of FIELDS) at(`sample-${name}`).value = values[name] ?? (name === "sort" ? "step" : "");
    findSamples();
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
    for (const name of FIELDS) setView(name, at(`sample-${name}`).value, name === "sort" ? "step" : "");
    samples.found = samples.all.filter((s) =>
      (!query || s.text.includes(query)) && (!kind || s.group.kind === kind) && (run === "" || s.run === Number(run)) &&
      s.group.step >= from && s.group.step <= to);
    samples.found.sort((a, b) => key(b) - key(a));
    samples.shown = 0;
    at("sample-list").replaceChildren();
    at("sample-count").textContent = samples.all.length
      ? `${samples.found.length.toLocaleString("en")} of ${samples.all.length.toLocaleString("en")} responses.`
      : "No samples: samples.jsonl is empty or missing.";
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
    at("sample-more").textContent = `show more (${(samples.found.length - samples.shown).toLocaleString("en")})`;
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

  function card(sample, isContinued) {
    const { group, response } = sample;
    const box = make("article", undefined, isContinued ? "sample goes-on" : "sample"), top = make("div", undefined, "top"), body = make("div", undefined, "body");
    const where = group.kind === "eval" ? `evaluation${group.set ? ` of ${group.set}` : ""}` : `round ${group.round}`;
    if (data.runs.length > 1) top.append(make("b", data.runs[sample.run].label));
    top.append(make("b", `step ${group.step}`), make("span", where));
    if (group.source) top.append(make("span", group.source));
    top.append(make("b", `reward ${number(response.reward)}`, response.reward > 0 ? "good" : "bad"));
    const scores = (response.scores || []).map(([name, value, verdict]) => `${name} ${number(value)} ${verdict}`);
    for (const fact of [...scores, ...factsOf(response)]) top.append(make("span", fact, "facts"));
    if (group.responses.length > 1) {
      const siblings = make("button", `all of its group of ${group.of || group.responses.length}`, "link");
      siblings.type = "button";
      siblings.addEventListener("click", () => showSamples({ search: group.ticket, kind: group.kind, run: sample.run }));
      top.append(siblings);
    }
    if (!isContinued) body.append(make("h4", "prompt"), marked(group.prompt));
    if (group.answer && !isContinued) body.append(make("h4", "reference answer"), marked(group.answer));
    for (const [byPolicy, text] of response.parts) {
      if (!isContinued || response.parts.length > 1) body.append(make("h4", byPolicy ? "response" : "environment"));
      body.append(marked(text, byPolicy ? "" : "observed"));
    }
    if (response.left_out) body.append(make("p", `${response.left_out} turns between are not stored`, "soft"));
    const about = [`ticket ${group.ticket}`, `problem ${group.problem}`, group.environment && `environment ${group.environment}`].filter(Boolean);
    if (!isContinued) {
      const more = make("details", undefined, "soft");
      more.dataset.of = `sample ${sample.run} ${group.kind} ${group.step} ${group.ticket}`;
      more.append(make("summary", about.join(" · ")), make("p", group.about || "The dataset row has no further fields."));
      body.append(more);
    }
    box.append(top, body);
    return box;
  }

  function factsOf(r) {
    const facts = [];
    if (r.turn_rewards) facts.push(`rewards per turn ${r.turn_rewards.map((v) => number(v)).join(" ")}`);
    if (r.advantage !== undefined) facts.push(`advantage ${number(r.advantage)}`);
    if (r.turn_advantages) facts.push(`advantages per turn ${r.turn_advantages.map((v) => number(v)).join(" ")}`);
    if (r.lag !== undefined) facts.push(`lag ${number(r.lag)}${r.lag_max === undefined ? "" : `, maximum ${r.lag_max}`}`);
    if (r.versions && r.versions[0] !== null) facts.push(`weights of step ${r.versions[0] === r.versions[1] ? r.versions[0] : r.versions.join("-")}`);
    facts.push(`${r.tokens} tokens`);
    if (r.observed) facts.push(`${r.observed} observed tokens`);
    if (r.finish) facts.push(`finish ${r.finish}`);
    if (r.actor) facts.push(r.actor);
    return facts;
  }

  function startSamples() {
    flatten();
    option(at("sample-run"), "", "all");
    data.runs.forEach((run, i) => option(at("sample-run"), i, run.label));
    at("sample-run-label").hidden = data.runs.length < 2;
    for (const name of FIELDS) {
      const field = at(`sample-${name}`);
      field.value = inView(name, field.value);
      if (field.tagName === "SELECT" && field.selectedIndex < 0) field.selectedIndex = 0;  // not an option of this report
    }
    let timer;
    at("sample-search").addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(findSamples, 150); });
    for (const id of ["sample-run", "sample-kind", "sample-sort", "sample-from", "sample-to"]) at(id).addEventListener("change", findSamples);
    at("sample-more").addEventListener("click", moreSamples);
    document.querySelectorAll("button.problem").forEach((button) => button.addEventListener("click", () => {
      showSamples({ search: button.dataset.problem, kind: "eval", run: button.dataset.run });
      goTo("samples");
    }));
    findSamples();
    while (samples.shown < Math.min(memory.kept.samplesShown || 0, samples.found.length)) moreSamples();
  }
