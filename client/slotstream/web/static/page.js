// Comfort alone: without this file everything can be read, by links and forms.
"use strict";

for (const box of document.querySelectorAll(".copy")) {
  if (!navigator.clipboard) break;
  const button = document.createElement("button");
  button.className = "quiet";
  button.textContent = "Copy";
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(box.querySelector("code").textContent);
    button.textContent = "Copied";
  });
  box.append(button);
}

// The overview asks for itself again, and takes over what may have changed. Not on a later page, whose rows would move on.
const EVERY_MS = 5000;
const state = document.getElementById("state");
if (state && !new URLSearchParams(location.search).has("page")) {
  let paused = false;
  const button = document.createElement("button");
  button.className = "quiet";
  const say = (words) => {
    const place = document.querySelector("[data-live]");
    button.textContent = paused ? "Go on" : "Pause";
    place.replaceChildren(words + " ", button);
  };
  button.addEventListener("click", () => {
    paused = !paused;
    say(paused ? "paused" : "live");
  });
  const again = async () => {
    if (!paused && !document.hidden) {
      try {
        const answer = await fetch(location.href, { redirect: "manual" });
        if (answer.type === "opaqueredirect") location.reload(); // To the login: the session is over.
        if (!answer.ok) throw new Error(String(answer.status));
        const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
        if (!paused) {
          for (const id of ["state", "list"]) {
            const old = document.getElementById(id);
            if (!old.contains(document.activeElement)) old.replaceWith(fresh.getElementById(id));
          }
          say("live");
        }
      } catch {
        say("no answer; trying again");
      }
    }
    setTimeout(again, EVERY_MS);
  };
  say("live");
  setTimeout(again, EVERY_MS);
}
