"use strict";
// Filters and sorts the table, opens a site beside its nodes and its plan, and follows links between them.

const sites = [...document.querySelectorAll(".site")];
const table = document.getElementById("table");
const find = document.getElementById("find");
const nodesOf = (number) => [...document.querySelectorAll(`article.graph .l[data-s="${number}"]`)];

// --- filter and sort ---------------------------------------------------------------------------------

let shown = "all";

function filter() {
  const words = find.value.toLowerCase().split(/\s+/).filter(Boolean);
  let count = 0;
  for (const site of sites) {
    const text = (site.querySelector(".row").textContent + " " + site.dataset.source + " " + site.dataset.what).toLowerCase();
    site.hidden = !((shown === "all" || site.classList.contains(shown)) && words.every((w) => text.includes(w)));
    count += !site.hidden;
  }
  const all = sites.length;
  document.getElementById("count").value = count === all ? `${all} sites` : `${count} of ${all} sites`;
  document.getElementById("none").hidden = count > 0;
}

function show(which) {
  shown = which;
  for (const button of document.querySelectorAll("[data-show]")) {
    button.setAttribute("aria-pressed", button.dataset.show === which);
  }
  filter();
}

function sort(button) {
  const head = button.closest("th");
  const key = button.dataset.key;
  const down = head.getAttribute("aria-sort") === "ascending";
  for (const other of head.parentNode.children) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  const words = new Intl.Collator(undefined, { numeric: true });
  const ordered = [...sites].sort(
    (a, b) => words.compare(a.dataset[key], b.dataset[key]) || a.dataset.number - b.dataset.number,
  );
  if (down) ordered.reverse();
  table.append(...ordered);
}

// --- a site, its nodes and its plan ------------------------------------------------------------------

function highlight(number) {
  for (const element of document.querySelectorAll(".on")) element.classList.remove("on");
  if (number === null) return;
  document.getElementById(`s${number}`).classList.add("on");
  for (const node of nodesOf(number)) {
    node.classList.add("on");
    const fold = node.closest("details");
    if (fold) fold.open = true;
  }
}

function excerpt(site) {
  const box = site.querySelector(".excerpt");
  if (box.childElementCount) return;
  const blocks = new Set(nodesOf(site.dataset.number).map((node) => node.closest(".change, .same")));
  for (const block of blocks) {
    const copy = block.cloneNode(true);
    const own = (line) => line.dataset.s === site.dataset.number;
    for (const line of copy.querySelectorAll(".l")) {
      line.removeAttribute("id");
      if (!own(line)) line.remove();
    }
    for (const at of copy.querySelectorAll(".at")) {
      if (!at.nextElementSibling?.classList.contains("l")) at.remove();
    }
    box.append(copy);
  }
  const link = site.querySelector("[data-plan]");
  const drawings = link && document.querySelector(`#p${link.dataset.plan} .pair`);
  if (drawings) box.append(drawings.cloneNode(true));
}

function open(site, wanted) {
  const detail = site.querySelector(".detail");
  detail.hidden = !wanted;
  site.querySelector(".chip").setAttribute("aria-expanded", wanted);
  if (wanted) excerpt(site);
  highlight(wanted ? site.dataset.number : null);
}

function toggle(site) {
  open(site, site.querySelector(".detail").hidden);
}

// #s3 is a site, #n3 its first node.
function follow() {
  const [, kind, number] = location.hash.match(/^#([sn])(\d+)$/) ?? [];
  const site = kind && document.getElementById(`s${number}`);
  if (!site) return;
  if (kind === "s" && site.hidden) {
    find.value = "";
    show("all");
  }
  open(site, true);
  document.getElementById(kind + number)?.scrollIntoView({ block: kind === "s" ? "start" : "center" });
}

table?.addEventListener("click", (event) => {
  const key = event.target.closest("[data-key]");
  const row = event.target.closest(".row");
  if (key) sort(key);
  else if (row && !event.target.closest("a") && !getSelection().toString()) toggle(row.closest(".site"));
});
document.getElementById("graphs")?.addEventListener("click", (event) => {
  const node = event.target.closest(".tied");
  if (node && !event.target.closest("a") && !getSelection().toString()) open(document.getElementById(`s${node.dataset.s}`), true);
});
document.querySelector(".choice")?.addEventListener("click", (event) => {
  if (event.target.dataset.show) show(event.target.dataset.show);
});
find?.addEventListener("input", filter);
addEventListener("hashchange", follow);
// A link to where we are already changes nothing, yet is meant.
addEventListener("click", (event) => {
  if (event.target.closest?.("a")?.hash === location.hash) follow();
});
follow();
