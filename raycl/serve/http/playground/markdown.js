// A model's Markdown as elements: paragraphs, headings, lists, quotes, code, emphasis and links.
// All of it is untrusted text: elements are made one by one, words become text nodes, and links lead to the web alone.

const FENCE = /^\s*```[^`]*$/; // a line with the closing one too is code among words
const FENCE_END = /^\s*```\s*$/;
const HEADING = /^(#{1,6})\s+(.*)/;
const ITEM = /^\s*(?:([-*+])|(\d{1,9})[.)])\s+(.*)/;
const QUOTE = /^\s*>\s?(.*)/;
const INLINE = /(`+)(.+?)\1|\*\*(.+?)\*\*|(?<!\w)__(.+?)__(?!\w)|\*([^*\s][^*]*?)\*|\[([^\]]+)\]\((\S+?)\)/s;

function element(name, ...children) {
  const found = document.createElement(name);
  found.append(...children);
  return found;
}

/** Words with emphasis, code and links inside. */
function inline(text) {
  const nodes = [];
  let left = text;
  for (let match = INLINE.exec(left); match; match = INLINE.exec(left)) {
    const [whole, , code, strong, also, emphasis, words, address] = match;
    nodes.push(left.slice(0, match.index));
    if (code !== undefined) nodes.push(element("code", code));
    else if (strong ?? also) nodes.push(element("strong", ...inline(strong ?? also)));
    else if (emphasis) nodes.push(element("em", ...inline(emphasis)));
    else nodes.push(link(words, address, whole));
    left = left.slice(match.index + whole.length);
  }
  return [...nodes, left].filter((node) => node !== "");
}

function link(words, address, whole) {
  if (!/^https?:\/\//i.test(address) || !URL.canParse(address)) return whole;
  const found = element("a", words);
  found.href = address;
  found.rel = "noopener noreferrer nofollow";
  found.target = "_blank";
  return found;
}

/** The elements of a text, which may end anywhere. */
export function markdown(text) {
  const lines = text.split("\n");
  const blocks = [];
  let place = 0;
  const taken = (pattern) => {
    const found = [];
    for (let match; place < lines.length && (match = pattern.exec(lines[place])); place += 1) found.push(match);
    return found;
  };
  while (place < lines.length) {
    const line = lines[place];
    const heading = HEADING.exec(line);
    const item = ITEM.exec(line);
    if (FENCE.test(line)) {
      const end = lines.findIndex((other, number) => number > place && FENCE_END.test(other));
      const stop = end < 0 ? lines.length : end;
      blocks.push(element("pre", element("code", lines.slice(place + 1, stop).join("\n"))));
      place = stop + 1;
    } else if (heading) {
      blocks.push(element(heading[1].length < 3 ? "h3" : "h4", ...inline(heading[2])));
      place += 1;
    } else if (item) {
      const same = item[1] ? /^\s*([-*+])()\s+(.*)/ : /^\s*()(\d{1,9})[.)]\s+(.*)/;
      blocks.push(element(item[1] ? "ul" : "ol", ...taken(same).map((match) => element("li", ...inline(match[3])))));
      if (item[2]) blocks.at(-1).start = Number(item[2]);
    } else if (QUOTE.test(line)) {
      blocks.push(element("blockquote", ...inline(taken(QUOTE).map((match) => match[1]).join("\n"))));
    } else if (line.trim()) {
      const words = [];
      do words.push(lines[place++]);
      while (place < lines.length && lines[place].trim() && ![FENCE, HEADING, ITEM, QUOTE].some((one) => one.test(lines[place])));
      const paragraph = element("p", ...inline(words.join("\n")));
      paragraph.style.whiteSpace = "pre-line";
      blocks.push(paragraph);
    } else place += 1;
  }
  return blocks;
}
