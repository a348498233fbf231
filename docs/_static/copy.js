/* A button at each block of code that copies it; of a session only what is typed. */
const typed = (text) => {
  const prompt = /^(>>>|\.\.\.|\$)( |$)/;
  const lines = text.split("\n");
  const kept = lines.filter((line) => prompt.test(line)).map((line) => line.replace(prompt, ""));
  return prompt.test(lines[0]) ? kept.join("\n") : text.trimEnd();
};

document.addEventListener("DOMContentLoaded", () => {
  if (!navigator.clipboard) return; // a browser gives it to https, localhost and files alone
  for (const block of document.querySelectorAll("div.highlight")) {
    const code = block.querySelector("pre");
    if (!code || block.querySelector(".viewcode-block")) continue;
    const text = typed(code.textContent);
    const button = document.createElement("button");
    button.className = "copy";
    button.type = "button";
    button.textContent = "Copy";
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
      setTimeout(() => (button.textContent = "Copy"), 1500);
    });
    block.append(button);
  }
});
