// What is shown before there is a text: the served tasks, their labels and examples of their texts.
// Names, labels and texts are untrusted: they become text nodes, never markup.

const TASKS = 12;
const LABELS = 6;

const $ = (id) => document.getElementById(id);

function element(name, words, className = "") {
  const found = document.createElement(name);
  found.textContent = words;
  if (className) found.className = className;
  return found;
}

/** @param {(text: string) => void} choose called with the example that was clicked */
export function drawExamples(tasks, choose) {
  const some = tasks.some((task) => task.examples.length);
  $("empty-title").textContent = some ? "Try a text of a served task" : "Served tasks";
  $("examples").replaceChildren(...tasks.slice(0, TASKS).map((task) => row(task, choose)));
  const rest = tasks.length - TASKS;
  $("more-tasks").textContent = rest > 0 ? `and ${rest} more ${rest === 1 ? "task" : "tasks"}` : "";
}

function row(task, choose) {
  const found = element("li", "");
  found.append(element("h3", task.name));
  if (task.labels?.length) found.append(element("p", labels(task.labels), "hint"));
  else if (task.definition) found.append(element("p", task.definition, "hint definition"));
  for (const text of task.examples) {
    const button = element("button", text, "example");
    button.type = "button";
    button.addEventListener("click", () => choose(text));
    found.append(button);
  }
  return found;
}

function labels(all) {
  const rest = all.length - LABELS;
  return rest > 0 ? `${all.slice(0, LABELS).join(" · ")} and ${rest} more ${rest === 1 ? "label" : "labels"}` : all.join(" · ");
}
