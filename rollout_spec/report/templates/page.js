"use strict";
(() => {
  // Okabe and Ito's colours, which people with any colour blindness can tell apart; each run also has its own marker.
  const COLOURS = {
    light: ["#0072b2", "#d55e00", "#009e73", "#a8508c", "#8a6d00", "#3a8fc4"],
    dark: ["#56b4e9", "#ff9a4d", "#2fd3a3", "#e9a0cf", "#e6c229", "#9ad0f5"],
  };
  const MARKERS = ["circle", "square", "diamond", "triangle-up", "cross", "star"];
  const PATTERNS = ["", "/", "x", "."];
  const MARKS = { good: "✓", neutral: "•", bad: "!" };
  const live = document.body.dataset.live === "yes";
  let data = JSON.parse(document.getElementById("data").textContent);
  const drawn = new Map(); // panel name -> element that holds its plot

  function make(tag, attributes = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  }

  const theme = () => document.documentElement.dataset.theme || "light";
  const variable = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function styled(trace) {
    const palette = COLOURS[theme()];
    const place = trace.part ?? trace.run ?? 0;
    const colour = palette[place % palette.length];
    const out = { ...trace, line: { width: 2, ...trace.line, color: colour } };
    out.marker = { size: 8, symbol: MARKERS[place % MARKERS.length], ...trace.marker, color: colour };
    if (trace.type === "bar") {
      out.marker = { color: colour, pattern: { shape: PATTERNS[place % PATTERNS.length], solidity: 0.25 } };
      delete out.line;
    }
    return out;
  }

  function axis(given) {
    return { gridcolor: variable("--line"), zerolinecolor: variable("--line"), linecolor: variable("--line"), automargin: true, ...given };
  }

  function layoutOf(panel) {
    const given = panel.layout;
    const layout = {
      ...given,
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: variable("--text"), family: "system-ui, sans-serif", size: 12 },
      margin: { l: 52, r: given.yaxis2 ? 52 : 14, t: 8, b: 46 + legendHeight(panel) },
      showlegend: panel.traces.length > 1,
      legend: { orientation: "h", yref: "container", y: 0, yanchor: "bottom", font: { size: 11 } },
      hovermode: "closest",
      xaxis: axis(given.xaxis),
      yaxis: axis(given.yaxis),
      shapes: [],
    };
    if (given.yaxis2) layout.yaxis2 = axis({ tickmode: "auto", ...given.yaxis2 });
    if (given.line_at !== undefined) {
      layout.shapes.push({ type: "line", xref: "paper", x0: 0, x1: 1, y0: given.line_at, y1: given.line_at,
        line: { color: variable("--soft"), width: 1, dash: "dash" } });
    }
    delete layout.line_at;
    return layout;
  }

  const legendHeight = (panel) => (panel.traces.length > 1 ? 20 * panel.traces.length : 0);

  function draw(panel) {
    const place = drawn.get(panel.name);
    if (!place) return;
    place.style.height = `${270 + legendHeight(panel)}px`;
    Plotly.react(place, panel.traces.map(styled), layoutOf(panel), { displayModeBar: false, responsive: true });
  }

  function tableOf(panel) {
    const head = make("tr", {}, make("th", { scope: "col" }, "series"), make("th", { scope: "col" }, panel.layout.xaxis.title?.text ?? "of"),
      make("th", { scope: "col" }, "value"));
    const rows = [];
    for (const trace of panel.traces) {
      trace.x.forEach((x, i) => {
        if (trace.y[i] !== null) rows.push(make("tr", {}, make("td", {}, trace.name), make("td", {}, String(x)), make("td", {}, String(trace.y[i]))));
      });
    }
    return make("div", { class: "scroll", tabindex: "0" }, make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows)));
  }

  function panelOf(panel) {
    const box = make("article", { class: "panel", id: `panel-${panel.name}`, "aria-label": panel.title });
    box.append(make("h2", {}, panel.title), make("p", {}, panel.about));
    if (panel.empty) {
      box.append(make("div", { class: "empty" }, panel.empty));
      return box;
    }
    box.append(make("div", { class: "plot", role: "img", "aria-label": `${panel.title}. ${panel.about} The figures are in the table below.` }));
    const more = make("details", {}, make("summary", {}, "As a table"));
    more.addEventListener("toggle", () => {
      more.querySelector(".scroll")?.remove();
      const current = data.panels.find((other) => other.name === panel.name);
      if (more.open) more.append(tableOf(current));
    });
    box.append(more);
    return box;
  }

  // Plots are drawn when they come near the screen: a page of sixteen opens at once.
  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      watcher.unobserve(entry.target);
      const name = entry.target.parentElement.id.slice("panel-".length);
      drawn.set(name, entry.target);
      draw(data.panels.find((panel) => panel.name === name));
      document.body.dataset.drawn = String(drawn.size);
      document.body.dataset.drawnMs = String(Math.round(performance.now())); // since the page was asked for
    }
  }, { rootMargin: "200px" });

  function showPanels() {
    const section = document.getElementById("panels");
    for (const panel of data.panels) {
      const before = document.getElementById(`panel-${panel.name}`);
      if (before && Boolean(before.querySelector(".plot")) === !panel.empty) {
        draw(panel);
        continue;
      }
      const box = panelOf(panel);
      drawn.delete(panel.name);
      if (before) before.replaceWith(box);
      else section.append(box);
      const plot = box.querySelector(".plot");
      if (plot) watcher.observe(plot);
    }
  }

  function showVerdict() {
    const boxes = data.runs.map((run, number) => {
      const facts = [run.model, run.drafters.join(", "), run.verifiers.join(", "), run.budget && `budget ${run.budget}`, `${run.rounds} rounds`];
      const box = make("div", { class: "run" });
      const palette = COLOURS[theme()];
      box.style.borderLeftColor = palette[number % palette.length];
      box.append(make("h2", {}, run.name, make("small", {}, facts.filter(Boolean).join(" · "))));
      box.append(make("ul", {}, ...run.verdict.map((said) => make("li", { class: said.level, "data-mark": MARKS[said.level] }, said.text))));
      box.append(...run.notes.map((note) => make("p", { class: "note" }, `Note: ${note}.`)));
      return box;
    });
    document.getElementById("verdict").replaceChildren(...boxes);
  }

  function showFigures() {
    const section = document.getElementById("figures");
    const open = section.querySelector("details")?.open ?? false;
    const head = make("tr", {}, ...["figure", ...data.runs.map((run) => run.name), "unit", "pooled as", "bonus", "formula"].map((text) =>
      make("th", { scope: "col" }, text)));
    const rows = data.table.map((row) => make("tr", {}, make("td", {}, row.name), ...row.values.map((value) => make("td", {}, value === null ? "–" : String(value))),
      make("td", {}, row.unit), make("td", {}, row.pooling), make("td", {}, row.bonus), make("td", { class: "words" }, row.formula)));
    const details = make("details", {}, make("summary", {}, "All figures, with their definitions"),
      make("div", { class: "scroll", tabindex: "0" }, make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows))));
    details.open = open;
    section.replaceChildren(details);
  }

  const ORIGINS = { recovered: "recovered: drawn after the draft was refused", bonus: "bonus: drawn after the whole draft was accepted",
    undrafted: "undrafted: nothing was proposed for it" };

  function tokenOf(sample, i) {
    const origin = sample.origins[i];
    const accepted = /^\d+$/.test(origin);
    const said = `${accepted ? `drafted, accepted at depth ${origin}` : ORIGINS[origin]}; log-probability ${sample.logprobs[i]}, ` +
      `entropy ${sample.entropies[i]} nats`;
    const token = make("span", { class: `token ${accepted ? "accepted" : origin}`, title: said, tabindex: i === 0 ? "0" : "-1", role: "listitem" },
      sample.texts[i]);
    if (accepted) {
      token.dataset.depth = origin;
      token.style.setProperty("--depth", String(Math.min(Number(origin), 7)));
    }
    token.dataset.said = `Token ${i + 1} of ${sample.ids.length}, id ${sample.ids[i]}, ${JSON.stringify(sample.texts[i])}: ${said}.`;
    return token;
  }

  function showSample(sample) {
    const text = document.querySelector("#samples .tokens");
    const detail = document.getElementById("detail");
    text.replaceChildren(...sample.ids.map((_, i) => tokenOf(sample, i)));
    const drafted = sample.origins.filter((origin) => /^\d+$/.test(origin)).length;
    detail.textContent = `${sample.ids.length} tokens in ${sample.rounds} rounds, ${drafted} of them drafted; ended by ${sample.ended}. ` +
      "Point at a token, or walk with the arrow keys.";
  }

  function showSamples() {
    const section = document.getElementById("samples");
    if (!section || !data.samples.length) {
      section?.remove();
      return;
    }
    const choice = make("select", { id: "sample" });
    data.samples.forEach((group, g) => {
      const options = group.samples.map((sample, s) => make("option", { value: `${g}/${s}` }, sample.name));
      choice.append(make("optgroup", { label: group.run }, ...options));
    });
    const swatch = (kind, depth, text) => {
      const mark = make("span", { class: `token ${kind}` }, "token");
      if (depth) {
        mark.dataset.depth = depth;
        mark.style.setProperty("--depth", depth);
      }
      return make("li", {}, mark, ` ${text}`);
    };
    section.append(
      make("h2", {}, "Samples: how each token came"),
      make("p", { class: "about" }, make("label", { for: "sample" }, "Sample "), choice),
      make("ul", { class: "legend" }, swatch("accepted", "1", "drafted, accepted at that depth"), swatch("accepted", "4", "deeper is darker"),
        swatch("recovered", "", "recovered"), swatch("bonus", "", "bonus"), swatch("undrafted", "", "undrafted")),
      make("div", { class: "tokens", role: "list", "aria-label": "Tokens" }), make("div", { id: "detail", role: "status" }));
    const text = section.querySelector(".tokens");
    const tell = (event) => {
      if (event.target.dataset?.said) document.getElementById("detail").textContent = event.target.dataset.said;
    };
    text.addEventListener("mouseover", tell);
    text.addEventListener("focusin", tell);
    text.addEventListener("keydown", (event) => {
      const here = document.activeElement;
      const next = { ArrowRight: here.nextElementSibling, ArrowLeft: here.previousElementSibling, Home: text.firstElementChild,
        End: text.lastElementChild }[event.key];
      if (!next || !text.contains(here)) return;
      event.preventDefault();
      here.tabIndex = -1;
      next.tabIndex = 0;
      next.focus();
    });
    const pick = () => {
      const [g, s] = choice.value.split("/").map(Number);
      showSample(data.samples[g].samples[s]);
    };
    choice.addEventListener("change", pick);
    pick();
  }

  function show() {
    showVerdict();
    showPanels();
    showFigures();
  }

  function setTheme(name) {
    document.documentElement.dataset.theme = name;
    const button = document.getElementById("theme");
    button.textContent = name === "dark" ? "Light" : "Dark";
    button.setAttribute("aria-pressed", String(name === "dark"));
  }

  const dark = matchMedia("(prefers-color-scheme: dark)");
  setTheme(dark.matches ? "dark" : "light");
  dark.addEventListener("change", () => { setTheme(dark.matches ? "dark" : "light"); show(); });
  document.getElementById("theme").addEventListener("click", () => { setTheme(theme() === "dark" ? "light" : "dark"); show(); });
  show();
  showSamples();

  if (live) {
    const state = document.getElementById("state");
    const source = new EventSource(`events${location.search}`);
    source.onopen = () => { state.textContent = "live"; };
    source.onerror = () => { state.textContent = "the server is gone; trying again"; };
    source.onmessage = (message) => {
      data = { samples: [], ...JSON.parse(message.data) };
      state.textContent = `live, ${new Date().toLocaleTimeString()}`;
      show();
    };
  }
})();
