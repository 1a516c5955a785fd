(() => {
  const panels = JSON.parse(document.getElementById("panels").textContent);
  const root = document.documentElement, button = document.getElementById("theme"), drawn = new Map();
  const coarse = matchMedia("(pointer: coarse)").matches, dark = matchMedia("(prefers-color-scheme: dark)");
  const config = { responsive: true, displaylogo: false, displayModeBar: false };
  const themed = (value, style) => {
    if (typeof value === "string" && value[0] === "@") {
      const name = value.slice(1), fill = /^f\d$/.test(name);
      return style.getPropertyValue("--" + (fill ? "c" + name[1] : name)).trim() + (fill ? "b0" : "");
    }
    if (Array.isArray(value)) return value.map((each) => themed(each, style));
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([key, each]) => [key, themed(each, style)]));
  };
  const draw = (place) => {
    const { data, layout } = themed(panels[place.dataset.panel], getComputedStyle(root));
    if (coarse) layout.dragmode = false;
    const first = !drawn.has(place);
    drawn.set(place, true);
    (first ? Plotly.newPlot(place, data, layout, config) : Plotly.react(place, data, layout, config)).then(() => {
      if (first) root.dataset.drawn = Number(root.dataset.drawn || 0) + 1;
    });
  };
  const places = [...document.querySelectorAll(".plot")];
  const seen = new IntersectionObserver((entries) => entries.forEach((entry) => {
    if (entry.isIntersecting) { seen.unobserve(entry.target); draw(entry.target); }
  }), { rootMargin: "800px" });
  places.forEach((place) => seen.observe(place));
  addEventListener("beforeprint", () => places.forEach((place) => drawn.has(place) || draw(place)));
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
})();
