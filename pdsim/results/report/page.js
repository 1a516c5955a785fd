(() => {
  const panels = JSON.parse(document.getElementById("panels").textContent);
  const root = document.documentElement, button = document.getElementById("theme"), drawn = new Map();
  const coarse = matchMedia("(pointer: coarse)").matches, dark = matchMedia("(prefers-color-scheme: dark)");
  const config = { responsive: true, displaylogo: false, displayModeBar: false };
  const axis = {
    gridcolor: "@grid", linecolor: "@line", tickcolor: "@line", tickfont: { color: "@muted", size: 11 }, ticks: "outside",
    ticklen: 4, zeroline: false, showline: true, automargin: true, title: { font: { size: 12, color: "@muted" }, standoff: 8 },
  };
  const shared = {
    margin: { l: 8, r: 12, t: 8, b: 8 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", bargap: 0.18,
    font: { family: "system-ui, sans-serif", size: 12, color: "@ink" }, hovermode: "closest", xaxis: axis, yaxis: axis,
    hoverlabel: { bgcolor: "@panel", bordercolor: "@line", font: { color: "@ink", size: 12 } },
    legend: { orientation: "h", x: 0, xanchor: "left", y: 1.02, yanchor: "bottom", font: { size: 12 }, traceorder: "normal" },
  };
  const themed = (value, style) => {
    if (typeof value === "string" && value[0] === "@") return style.getPropertyValue("--" + value.slice(1)).trim();
    if (Array.isArray(value)) return value.map((each) => themed(each, style));
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([key, each]) => [key, themed(each, style)]));
  };
  const labels = (unit) => {  // plotly leaves out the unit between powers of ten
    const all = {};
    for (const power of [0.01, 0.1, 1, 10, 100])
      for (let digit = 1; digit < 10; digit++)
        for (const prefix of ["n", "µ", "m", "", "k", "M", "G", "T"]) {
          const label = +(digit * power).toPrecision(1) + prefix;
          all[label] = label + unit;
        }
    return all;
  };
  const explored = document.getElementById("explore");  // of a page that is served
  const open = (event) => {
    const name = /(?:^|>)(\w+)$/.exec(event.points[0].hovertext || event.points[0].text || "");
    if (name && explored.querySelector(`option[value="${name[1]}"]`)) location.href = "/point?name=" + name[1];
  };
  const draw = (place) => {
    const { data, layout } = themed(panels[place.dataset.panel], getComputedStyle(root));
    for (const each of [layout.xaxis, layout.yaxis])
      if (each.type === "log" && each.ticksuffix) each.labelalias = labels(each.ticksuffix);
    layout.template = { layout: themed(shared, getComputedStyle(root)) };
    if (coarse) layout.dragmode = false;
    const first = !drawn.has(place);
    drawn.set(place, true);
    (first ? Plotly.newPlot(place, data, layout, config) : Plotly.react(place, data, layout, config)).then(() => {
      if (first && explored) place.on("plotly_click", open);
      if (first) root.dataset.drawn = Number(root.dataset.drawn || 0) + 1;
    });
  };
  const places = [...document.querySelectorAll(".plot")];
  const seen = new IntersectionObserver((entries) => entries.forEach((entry) => {
    if (entry.isIntersecting) { seen.unobserve(entry.target); draw(entry.target); }
  }), { rootMargin: "800px" });
  places.forEach((place) => seen.observe(place));
  document.querySelectorAll(".save").forEach((save) => save.addEventListener("click", () => {
    const place = document.querySelector(`.plot[data-panel="${save.dataset.of}"]`);
    Plotly.downloadImage(place, { format: "svg", filename: save.dataset.name, width: 720, height: place.clientHeight });
  }));
  const names = ["auto", "light", "dark"];
  const choose = (name) => {
    if (name === "auto") delete root.dataset.theme; else root.dataset.theme = name;
    button.textContent = "theme: " + name;
    drawn.forEach((_, place) => draw(place));
  };
  button.addEventListener("click", () =>
    choose(names[(names.indexOf(root.dataset.theme || "auto") + 1) % names.length]));
  dark.addEventListener("change", () => drawn.forEach((_, place) => draw(place)));
  choose("auto");
  let shown;
  addEventListener("beforeprint", () => {  // on white paper
    shown = root.dataset.theme || "auto";
    choose("light");
    places.forEach((place) => drawn.has(place) || draw(place));
  });
  addEventListener("afterprint", () => choose(shown));
})();
