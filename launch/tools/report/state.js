  // Data of the page, helpers, and the view that the address and a reload restore.

  const data = JSON.parse(document.getElementById("data").textContent);
  const follow = document.getElementById("page-script").dataset.follow;
  const at = (id) => document.getElementById(id);

  function make(tag, text, className) {
    const element = document.createElement(tag);
    if (text !== undefined) element.textContent = text;  // never markup: the text is untrusted
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

  // ---- view in the URL fragment: #PLACE&name=value..., where PLACE is the id of a section or figure

  const view = { place: "", values: new Map(), isPending: false };

  function decoded(text) {
    try { return decodeURIComponent(text); } catch { return ""; }
  }

  function readView() {
    const [place, ...rest] = location.hash.slice(1).split("&");
    view.place = decoded(place);
    view.values = new Map(rest.map((pair) => [pair.split("=")[0], decoded(pair.slice(pair.indexOf("=") + 1))]));
  }

  const inView = (name, fallback = "") => view.values.get(name) ?? fallback;

  // Values that equal their default are omitted, so that a link stays short and follows later defaults.
  function setView(name, value, fallback = "") {
    const text = String(value);
    if (text === String(fallback)) view.values.delete(name);
    else view.values.set(name, text);
    if (!view.isPending) queueMicrotask(writeView);  // one write per event: browsers limit their rate
    view.isPending = true;
  }

  function writeView() {
    view.isPending = false;
    const pairs = [...view.values].map(([name, value]) => `&${name}=${encodeURIComponent(value)}`);
    history.replaceState(history.state, "", view.place || pairs.length ? `#${view.place}${pairs.join("")}` : location.pathname + location.search);
  }

  function goTo(id) {
    view.place = id;
    writeView();
    at(id)?.scrollIntoView({ behavior: "instant" });
  }

  function startView() {
    addEventListener("hashchange", (event) => {
      const hash = new URL(event.newURL).hash.slice(1);
      if (hash.includes("&")) { location.reload(); return; }  // another view in the address bar
      view.place = decoded(hash);
      writeView();
    });
  }

  // ---- view of a reload in addition: zoom, hidden curves, opened details, position

  const memory = {
    key: `sluice ${document.title}`,
    kept: {},
    isReload: performance.getEntriesByType("navigation")[0]?.type === "reload",
    read() {
      if (!this.isReload) return;
      try { this.kept = JSON.parse(sessionStorage.getItem(this.key)) || {}; } catch { /* storage is disabled or foreign */ }
    },
    write(values) { try { sessionStorage.setItem(this.key, JSON.stringify(values)); } catch { /* disabled or full */ } },
  };
