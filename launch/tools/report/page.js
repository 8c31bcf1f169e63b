  // Start of the page, and updates of a served page.

  // A served page that was used is not replaced until the reader asks for the newer page, which keeps the view.
  let isTouched = false;

  function remember() {
    const section = [...document.querySelectorAll("section")].findLast((s) => s.getBoundingClientRect().top <= 80);
    const roundZoom = zoomed(model("timeline")?.x_range);
    memory.write({
      isTouched, zoom: zoomed(model("over")), roundZoom,
      lastRound: roundZoom ? rounds()[timeline.round]?.number : undefined,  // else a page that follows the run moves on
      hidden: [...document.querySelectorAll("button.key[aria-pressed=false]")].map(keyOf),
      samplesShown: samples.shown,
      opened: [...document.querySelectorAll("details[open]")].map((d) => d.dataset.of),
      place: scrollY > 0 && section ? [section.id, section.getBoundingClientRect().top] : null,
    });
  }

  function restore() {
    const { opened, place } = memory.kept;
    document.querySelectorAll("details").forEach((d) => { d.open = Boolean(opened?.includes(d.dataset.of)); });
    if (place && at(place[0])) scrollBy({ top: at(place[0]).getBoundingClientRect().top - place[1], behavior: "instant" });
    else if (!memory.isReload && view.place) goTo(view.place);
  }

  async function checkVersion() {
    let status = "";
    try {
      const answer = await fetch("/version", { cache: "no-store" });
      if (answer.ok && (await answer.text()) !== follow) {
        if (!isTouched && scrollY === 0) { location.reload(); return; }
        at("more-of-run").hidden = false;
      }
    } catch { status = "; the server is unreachable"; }
    at("following").textContent = status;
    setTimeout(checkVersion, 5000);
  }

  function startFollowing() {
    isTouched = Boolean(memory.kept.isTouched);
    for (const kind of ["pointerdown", "keydown", "input", "wheel", "touchstart"]) {
      addEventListener(kind, () => { isTouched = true; }, { capture: true, passive: true });
    }
    at("show-more-of-run").addEventListener("click", () => location.reload());
    setTimeout(checkVersion, 5000);
  }

  function whenDrawn(then, tries = 0) {
    if (allFigures().length >= document.querySelectorAll("[data-root-id]").length || tries > 200) then();
    else setTimeout(() => whenDrawn(then, tries + 1), 25);
  }

  memory.read();
  readView();
  history.scrollRestoration = "manual";
  startSamples();
  whenDrawn(() => {
    allFigures().forEach(paint);
    startTimeline();
    startCurves();
    startLogs();
    startKeys();
    startDownloads();
    startView();
    restore();
    addEventListener("pagehide", remember);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => allFigures().forEach(paint));
    document.documentElement.dataset.drawn = "yes";
  });
  if (follow) startFollowing();
