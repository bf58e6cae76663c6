"use strict";
// Shows what is in the page: tabs, charts, and the part of a candidate that is opened. Every text goes in as text, never as
// markup, because sources and messages were written by candidates.
(function () {
  const data = JSON.parse(document.getElementById("data").textContent);
  const tabs = [...document.querySelectorAll("nav [role=tab]")];

  function show(tab, focus) {
    for (const other of tabs) {
      const on = other === tab;
      other.setAttribute("aria-selected", String(on));
      other.tabIndex = on ? 0 : -1;
      document.getElementById(other.getAttribute("aria-controls")).classList.toggle("off", !on);
    }
    if (focus) tab.focus();
    if (tab.scrollIntoView) tab.scrollIntoView({ block: "nearest", inline: "nearest" });
  }

  function element(tag, text, kind) {
    const made = document.createElement(tag);
    if (text !== undefined) made.textContent = text;
    if (kind) made.className = kind;
    return made;
  }

  function table(rows, head) {
    const box = element("div", undefined, "wide");
    const made = box.appendChild(element("table"));
    rows.forEach((row, i) => {
      const line = made.appendChild(element("tr"));
      row.forEach((cell, j) => line.appendChild(element(head && i === 0 || !head && j === 0 ? "th" : "td", cell)));
    });
    return box;
  }

  // Kinds of line: unchanged, taken away, added, a place in the file, and a line of a whole source.
  const PREFIX = [" ", "-", "+", "", ""];
  const KIND = ["", "del", "add", "at", ""];

  function code(pairs) {
    const made = element("pre");
    made.tabIndex = 0;
    for (let i = 0; i < pairs.length; i += 2) {
      made.appendChild(element("span", PREFIX[pairs[i]] + data.lines[pairs[i + 1]], KIND[pairs[i]]));
    }
    return made;
  }

  function fill(box) {
    const node = data.nodes[box.dataset.node];
    if (!node || box.dataset.filled) return;
    box.dataset.filled = "yes";
    box.appendChild(table(node.facts));
    if (node.times.length > 1) box.appendChild(table(node.times, true));
    if (node.note) box.appendChild(element("p", node.note, "quiet"));
    if (node.diff.length) {
      box.appendChild(element("h3", "Change to its parent"));
      box.appendChild(code(node.diff));
    }
    if (node.source.length) {
      box.appendChild(element("h3", "Source"));
      box.appendChild(code(node.source.flatMap((line) => [4, line])));
    }
  }

  for (const box of document.querySelectorAll("details[data-node]")) {
    box.addEventListener("toggle", () => fill(box));
  }
  const filter = document.getElementById("only-right");
  if (filter) filter.addEventListener("change", () => document.getElementById("tree").classList.toggle("only-right", filter.checked));

  tabs.forEach((tab, i) => {
    tab.addEventListener("click", () => show(tab, false));
    tab.addEventListener("keydown", (event) => {
      const to = { ArrowRight: i + 1, ArrowLeft: i - 1, Home: 0, End: tabs.length - 1 }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      show(tabs[(to + tabs.length) % tabs.length], true);
    });
  });
  document.documentElement.classList.add("js");
  show(tabs[0], false);

  // ast: expressions are interpreted and not compiled, which the page's policy would forbid.
  const drawn = Object.entries(data.charts).map(([name, spec]) =>
    vegaEmbed("#chart-" + name, spec, { actions: false, renderer: "svg", ast: true, mode: "vega-lite" }));
  Promise.all(drawn).then(() => document.documentElement.classList.add("drawn"), (problem) => console.error(problem));
})();
