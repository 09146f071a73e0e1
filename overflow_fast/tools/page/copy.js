"use strict";
// Buttons behind code or a place: without JavaScript, or a clipboard, these can be selected.
for (const button of document.querySelectorAll("button.copy")) {
  button.hidden = false;
  button.addEventListener("click", async () => {
    const code = button.previousElementSibling;
    getSelection().selectAllChildren(code);
    try {
      await navigator.clipboard.writeText(code.textContent);
      button.textContent = "Copied";
    } catch {
      button.textContent = "Selected";
    }
  });
}
