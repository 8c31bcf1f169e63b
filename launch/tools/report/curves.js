  // Curves: colors, x axis, running mean, logarithmic axis, legends, downloads.

  const allFigures = () => Bokeh.documents.flatMap((d) => d.roots());
  const model = (name) => Bokeh.documents.map((d) => d.get_model_by_name(name)).find((m) => m);
  const curvesOf = (figure) => figure.renderers.filter((r) => r.tags[0] === "curve");

  function colours() {
    const style = getComputedStyle(document.documentElement);
    return Object.fromEntries(["ink", "soft", "line", "page"].map((n) => [n, style.getPropertyValue(`--${n}`).trim()]));
  }

  function paint(figure) {
    const c = colours();
    // opaque, so that a downloaded PNG is readable in any viewer
    figure.setv({ background_fill_color: c.page, background_fill_alpha: 1, border_fill_color: c.page, border_fill_alpha: 1 });
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

  // ---- x axis and running mean

  const axis = () => data.axes.find((a) => a.name === at("over")?.value) || data.axes[0];
  const windowSize = () => Number(at("window")?.value || data.window);

  // Mean of `width` neighbors, fewer at the ends, and its standard error from their spread (at least 3 values).
  function runningMean(values, width) {
    const mean = new Float32Array(values.length), low = new Float32Array(values.length), high = new Float32Array(values.length);
    for (let i = 0; i < values.length; i++) {
      const near = Array.from(values.slice(Math.max(0, i - Math.floor(width / 2)), i + Math.ceil(width / 2))).filter(Number.isFinite);
      const middle = near.reduce((sum, v) => sum + v, 0) / near.length;
      const variance = near.reduce((sum, v) => sum + (v - middle) ** 2, 0) / (near.length - 1);
      const error = near.length >= 3 ? Math.sqrt(variance / near.length) : NaN;
      mean[i] = middle; low[i] = middle - error; high[i] = middle + error;
    }
    return { mean, low, high };
  }

  function drawCurves() {
    const curves = allFigures().flatMap(curvesOf).filter((r) => r.tags[3]);
    for (const { name, updates } of data.sources) {
      const source = model(name);
      const columns = { x: source.data[axis().name] };
      for (const metric of new Set(curves.filter((r) => r.data_source === source).map((r) => r.tags[1]))) {
        const found = runningMean(source.data[metric], Math.max(1, Math.round(windowSize() / updates)));
        columns[`${metric} mean`] = found.mean;
        if (`${metric} mean low` in source.data) Object.assign(columns, { [`${metric} mean low`]: found.low, [`${metric} mean high`]: found.high });
      }
      source.data = { ...source.data, ...columns };
    }
    for (const curve of curves) curve.glyph.y = { field: `${curve.tags[1]} mean` };
    for (const r of allFigures().flatMap((f) => f.renderers)) if (r.tags[0] === "faint") r.glyph.line_alpha = windowSize() > 1 ? 0.3 : 0;
  }

  function drawOver() {
    const chosen = axis(), width = chosen.largest, over = model("over");
    drawCurves();
    for (const figure of allFigures()) if (figure.x_range === over) figure.below[0].axis_label = chosen.label;
    const whole = { start: -0.01 * width, end: 1.01 * width };
    over?.setv({ bounds: [-0.05 * width, 1.05 * width] });  // first: a start and an end outside the bounds are clipped
    over?.setv({ ...whole, reset_start: whole.start, reset_end: whole.end });
  }

  function startCurves() {
    if (!at("over")) return;
    data.axes.forEach((a) => option(at("over"), a.name, a.title));
    data.windows.forEach((w) => option(at("window"), w, w === 1 ? "none" : `${w} updates`));
    at("over-label").hidden = data.axes.length < 2;
    at("window-label").hidden = data.windows.length < 2;
    at("window").value = data.windows.includes(Number(inView("mean"))) ? inView("mean") : data.window;
    if (data.axes.some((a) => a.name === inView("over"))) at("over").value = inView("over");
    at("over").addEventListener("change", () => { setView("over", at("over").value, data.axes[0].name); drawOver(); });
    at("window").addEventListener("change", () => { setView("mean", at("window").value, data.window); drawCurves(); });
    drawOver();
    zoom(model("over"), memory.kept.zoom);
  }

  const zoomed = (range) => range && (range.start !== range.reset_start || range.end !== range.reset_end) ? [range.start, range.end] : null;

  function zoom(range, kept) { if (range && kept) range.setv({ start: kept[0], end: kept[1] }); }

  // ---- y axis

  function setLog(button, isLog) {
    button.setAttribute("aria-pressed", isLog);
    const figure = model(button.dataset.figure), range = figure.y_range;
    const create = (name) => new (Bokeh.Models.get(name))();
    figure.y_scale = create(isLog ? "LogScale" : "LinearScale");
    const ticker = create(isLog ? "LogTicker" : "BasicTicker");
    figure.left[0].setv({ ticker, formatter: create(isLog ? "LogTickFormatter" : "BasicTickFormatter") });
    for (const grid of figure.center) if (grid.type === "Grid" && grid.dimension === 1) grid.ticker = ticker;
    if (range.type === "DataRange1d") range.scale_hint = isLog ? "log" : "auto";
    else range.setv({ start: isLog ? range.end / 1e4 : 0, reset_start: isLog ? range.end / 1e4 : 0 });
    figure.renderers.forEach((r) => r.data_source.change.emit());
  }

  function startLogs() {
    const buttons = [...document.querySelectorAll("button.log")];
    const isPressed = (b) => b.getAttribute("aria-pressed") === "true";
    const byDefault = new Map(buttons.map((b) => [b, isPressed(b)]));
    const toggled = inView("log").split(",");
    for (const button of buttons) {
      if (toggled.includes(button.dataset.figure.slice(4))) setLog(button, !isPressed(button));
      button.addEventListener("click", () => {
        setLog(button, !isPressed(button));
        setView("log", buttons.filter((b) => isPressed(b) !== byDefault.get(b)).map((b) => b.dataset.figure.slice(4)).join(","));
      });
    }
  }

  // ---- legends: an entry hides and shows its curves

  function turn(key) {
    key.setAttribute("aria-pressed", key.getAttribute("aria-pressed") !== "true");
    const figure = model(key.dataset.figure);
    const hidden = [...document.querySelectorAll(`button.key[data-figure="${key.dataset.figure}"][aria-pressed=false]`)];
    const isHidden = ([run, line]) => hidden.some((k) => (!k.dataset.run || k.dataset.run === run) && (!k.dataset.line || k.dataset.line === line));
    for (const part of [...figure.renderers, ...figure.center]) if (part.name) part.visible = !isHidden(part.name.split("/"));
  }

  const keyOf = (key) => `${key.dataset.figure}/${key.textContent}`;

  function startKeys() {
    document.querySelectorAll("button.key").forEach((key) => {
      key.addEventListener("click", () => turn(key));
      if (memory.kept.hidden?.includes(keyOf(key))) turn(key);
    });
  }

  // ---- downloads

  // A spreadsheet runs text that begins with one of these characters.
  const cell = (value) => {
    const text = typeof value === "number" ? String(value) : String(value).replace(/^[=+\-@\t\r]/, "'$&");
    return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };

  function csvOf(figure) {
    const drawn = figure.renderers.filter((r) => ["curve", "bars"].includes(r.tags[0]));
    const isCurve = drawn[0].tags[0] === "curve";
    const places = isCurve ? data.axes.map((a) => [a.name, a.label]) : [["from", "from"], ["to", "to"]];
    const isSmoothed = drawn.some((r) => r.tags[3]);
    const rows = [["curve", ...places.map((p) => p[1]), "value", ...(isSmoothed ? ["running mean"] : [])]];
    for (const { tags: [, column, label, hasMean], data_source: { data: columns } } of drawn) {
      for (let i = 0; i < columns[column].length; i++) {
        rows.push([label, ...places.map((p) => columns[p[0]][i]), columns[column][i], ...(isSmoothed ? [hasMean ? columns[`${column} mean`][i] : ""] : [])]);
      }
    }
    return rows.map((row) => `${row.map(cell).join(",")}\r\n`).join("");
  }

  function startDownloads() {
    document.querySelectorAll("button.csv").forEach((button) => button.addEventListener("click", () => {
      const link = make("a");
      link.href = URL.createObjectURL(new Blob([csvOf(model(button.dataset.figure))], { type: "text/csv" }));
      link.download = `${button.dataset.figure.slice(4)}.csv`;
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 60000);
    }));
    document.querySelectorAll("button.png").forEach((button) => button.addEventListener("click", () => {
      model(button.dataset.figure).toolbar.tools.find((t) => t.type === "SaveTool").do.emit("save");
    }));
  }
