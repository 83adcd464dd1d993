// The picture to explore: filters, a slider for the cap, and the network that it picks. Text from outside is only ever
// set as text; plotly.js reads some markup in what it draws, so that names are escaped for it.
"use strict";
(function () {
  const data = JSON.parse(document.getElementById("explore-data").textContent);
  const points = data.points;
  const byId = (id) => document.getElementById(id);
  const escaped = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const ms = (value) => Number(value).toPrecision(3) + " ms";
  const fields = ["kind", "runtime", "precision", "threads"];
  const off = new Set();  // what the filters leave out, as "field value"
  let clicked = null;

  // The slider moves evenly in the logarithm of the latency, from the fastest to the slowest network.
  const all = points.map((point) => point.latency_ms);
  const fastest = Math.min(...all), slowest = Math.max(...all);
  const slider = byId("explore-cap");
  const capOf = (place) => place >= 1000 ? slowest : fastest * Math.pow(slowest / fastest, place / 1000);
  if (data.cap_ms !== null && slowest > fastest) {
    const place = 1000 * Math.log(data.cap_ms / fastest) / Math.log(slowest / fastest);
    slider.value = Math.max(0, Math.min(1000, Math.ceil(place)));
  }

  const ticks = [], steps = slowest < 10 * fastest ? [1, 1.5, 2, 3, 4, 5, 6, 8] : [1, 2, 5];  // times powers of ten
  for (let power = Math.floor(Math.log10(fastest)); power <= Math.ceil(Math.log10(slowest)); power += 1)
    ticks.push(...steps.map((step) => Number((step * Math.pow(10, power)).toPrecision(2))));

  const shown = () => points.filter((point) => fields.every((field) => !off.has(field + " " + point[field])));

  function picked(visible, cap) {
    const chosen = visible.find((point) => point.id === clicked);
    if (chosen) return chosen;
    const within = visible.filter((point) => point.can_be_picked && point.latency_ms <= cap * (1 + 1e-9));
    within.sort((one, other) => other.top1 - one.top1 || one.latency_ms - other.latency_ms);
    return within[0] || null;
  }

  function frontOf(some) {
    const sorted = some.filter((point) => point.can_be_picked)
      .sort((one, other) => one.latency_ms - other.latency_ms || other.top1 - one.top1);
    let best = -1;
    return sorted.filter((point) => point.top1 > best && ((best = point.top1), true));
  }

  function bars(some, value, low, high, scale) {
    const end = (point, name) => point[name] === null ? point[value] : point[name];
    return {type: "data", symmetric: false, thickness: 1, width: 0,
            array: some.map((point) => scale * (end(point, high) - point[value])),
            arrayminus: some.map((point) => scale * (point[value] - end(point, low)))};
  }

  function draw() {
    const visible = shown(), cap = capOf(Number(slider.value)), pick = picked(visible, cap);
    const traces = Array.from(new Set(visible.map((point) => point.front))).sort().map((name) => {
      const front = frontOf(visible.filter((point) => point.front === name));
      return {x: front.map((point) => point.latency_ms), y: front.map((point) => 100 * point.top1), mode: "lines",
              line: {shape: "hv", color: (data.kinds[name] || ["#1f5fbf"])[0], width: 1.4},
              opacity: 0.5, hoverinfo: "skip", showlegend: false};
    });
    for (const [kind, [color, symbol]] of Object.entries(data.kinds)) {
      const some = visible.filter((point) => point.kind === kind);
      if (!some.length) continue;
      traces.push({x: some.map((point) => point.latency_ms), y: some.map((point) => 100 * point.top1), mode: "markers",
                   name: kind, customdata: some.map((point) => point.id),
                   text: some.map((point) => point.told.map(escaped).join("<br>")),
                   hovertemplate: "%{text}<extra></extra>", marker: {size: 9, color: color, symbol: symbol},
                   error_x: bars(some, "latency_ms", "latency_ms_low", "latency_ms_high", 1),
                   error_y: bars(some, "top1", "top1_low", "top1_high", 100)});
    }
    if (pick) traces.push({x: [pick.latency_ms], y: [100 * pick.top1], mode: "markers", hoverinfo: "skip", showlegend: false,
                           marker: {size: 18, color: "rgba(0,0,0,0)", line: {color: "#1c2430", width: 2}}});
    const layout = {
      margin: {l: 60, r: 20, t: 10, b: 50}, height: 460, legend: {orientation: "h", y: 1.12}, hovermode: "closest",
      xaxis: {title: {text: "latency as measured (ms)"}, type: "log", tickvals: ticks, ticktext: ticks.map(String)},
      yaxis: {title: {text: data.axis}},
      shapes: [{type: "line", x0: cap, x1: cap, yref: "paper", y0: 0, y1: 1, line: {color: "#98a2b3", dash: "dot"}}]};
    Plotly.react("explore-plot", traces, layout, {displaylogo: false, responsive: true});
    byId("explore-cap-text").textContent = ms(cap);
    byId("explore-pick").textContent = pick ? pick.told.slice(0, 4).join(" · ") : "No network that is shown keeps this cap.";
    byId("explore-copy").hidden = !pick;
    byId("explore-command").textContent = pick ? pick.copy : "";
  }

  for (const field of fields) {
    const values = Array.from(new Set(points.map((point) => String(point[field])))).sort();
    if (values.length < 2) continue;
    const row = document.createElement("p");
    row.append(field + ": ");
    for (const value of values) {
      const label = document.createElement("label"), box = document.createElement("input");
      box.type = "checkbox"; box.checked = true; box.name = field; box.value = value;
      box.addEventListener("change", () => {
        off[box.checked ? "delete" : "add"](field + " " + value);
        draw();
      });
      label.append(box, " " + value + " ");
      row.append(label);
    }
    byId("explore-filters").append(row);
  }
  slider.addEventListener("input", () => { clicked = null; draw(); });
  byId("explore-copy").addEventListener("click", () => { byId("explore-command").hidden = false; });
  draw();
  byId("explore-plot").on("plotly_click", (event) => {
    const id = event.points[0].customdata;
    if (id) { clicked = id; draw(); }
  });
}());
