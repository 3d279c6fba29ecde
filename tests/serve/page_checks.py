"""JavaScript that a page runs on itself: it measures WCAG's contrast of text, and finds controls without a name."""

from __future__ import annotations

UNLABELLED = """
(() => [...document.querySelectorAll("input, select, textarea, button, [tabindex], [role=region], section")]
  .filter((e) => {
    const labels = [...(e.labels ?? [])].map((label) => label.textContent);
    const ids = (e.getAttribute("aria-labelledby") ?? "").split(" ");
    const by = ids.map((id) => document.getElementById(id)?.textContent);
    const own = e.tagName === "BUTTON" ? e.textContent : e.getAttribute("aria-label");
    return ![...labels, ...by, own].some((name) => name?.trim());
  })
  .map((e) => e.outerHTML.slice(0, 80)))()
"""
"""Controls and regions that have no name for assistive technology."""

CONTRAST = """
(() => {
  const channels = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const luminance = ([r, g, b]) => [[r, 0.2126], [g, 0.7152], [b, 0.0722]].reduce((sum, [c, weight]) => {
    const share = c / 255;
    return sum + weight * (share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4);
  }, 0);
  const background = (e) => {
    for (; e; e = e.parentElement) {
      const colour = channels(getComputedStyle(e).backgroundColor);
      if (colour[3] === undefined || colour[3] === 1) return colour;
      if (colour[3] !== 0) throw new Error("a background that shines through cannot be judged");
    }
    return [255, 255, 255];
  };
  const measured = [];
  for (const e of document.querySelectorAll("body *")) {
    const texts = [...e.childNodes].some((n) => n.nodeType === Node.TEXT_NODE && n.data.trim());
    if (!(texts || e.matches("input, textarea, select")) || !e.checkVisibility()) continue;
    const both = [luminance(channels(getComputedStyle(e).color)), luminance(background(e))];
    const ratio = (Math.max(...both) + 0.05) / (Math.min(...both) + 0.05);
    measured.push({ text: e.outerHTML.slice(0, 80), ratio });
  }
  return measured;
})()
"""
"""{text, ratio} of every element that shows text; WCAG AA requires a ratio of 4.5 (success criterion 1.4.3)."""
