"""The page at ``/``: a form, and the server's answers. It loads nothing from other hosts."""

from __future__ import annotations

import html
from importlib.resources import files
from typing import Any

from graphrun.serve.settings import Settings

KINDS = {"page.js": "text/javascript", "page.css": "text/css"}
ASSETS = {name: ((files(__package__) / name).read_bytes(), kind) for name, kind in KINDS.items()}
# only this server's scripts, styles and pictures; data: and blob: are pictures in its answers
POLICY = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; "
    "style-src 'self'; connect-src 'self'; "
    "img-src 'self' data: blob:; media-src blob:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def page(models: list[dict[str, Any]], settings: Settings) -> str:
    """Return the HTML. ``models``: as ``/v1/models`` shows them."""
    options = "".join(map(_option, models))
    rows = "".join(
        f"<tr><td>{html.escape(model['id'])}</td><td>{html.escape(_verdict(model))}</td></tr>"
        for model in models
    )
    key = (
        '<label>API key <input name="key" type="password" autocomplete="off" required></label>'
        if settings.keys
        else ""
    )
    bounds = settings.bounds
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">\
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>graphrun</title><link rel="stylesheet" href="page/page.css">\
<script src="page/page.js" defer></script></head>
<body><h1>graphrun</h1>
<form id="ask">
<label class="wide">Prompt \
<textarea name="prompt" rows="3" maxlength="{bounds.characters}" \
required autofocus></textarea></label>
<label class="wide" data-for="negative">Negative prompt \
<textarea name="negative_prompt" rows="1" maxlength="{bounds.characters}"></textarea></label>
<label>Model <select name="model">{options}</select></label>
<label data-for="image">Picture <input name="image" type="file" accept="image/*"></label>
<label>Size in pixels <input name="size" value="auto" pattern="auto|[0-9]+x[0-9]+" \
title="auto, or width x height such as 1024x768"></label>
<label data-for="pictures">Pictures <input name="n" type="number" min="1" \
max="{bounds.pictures}" value="1"></label>
<label data-for="seconds">Seconds <input name="seconds" type="number" min="0" step="any" \
placeholder="default"></label>
<label>Seed <input name="seed" type="number" min="0" placeholder="drawn"></label>
<label data-for="steps">Steps <input name="steps" type="number" min="1" max="{bounds.steps}" \
placeholder="default"></label>
{key}
<span class="wide buttons"><button id="make">Make it</button> \
<button type="button" id="stop" disabled>Cancel</button></span>
</form>
<p id="state" role="status"></p><progress id="bar" max="1" value="0" hidden></progress>
<figure id="preview" hidden><img alt="preview"></figure>
<div id="gallery"></div>
<table id="figures" hidden><caption>Time and memory of the last one</caption>
<thead><tr><th></th><th>planned</th><th>measured</th></tr></thead><tbody></tbody></table>
<table><caption>Models on this server</caption><tbody>{rows}</tbody></table>
</body></html>
"""


def _option(model: dict[str, Any]) -> str:
    """Return the choice of a model, with what it takes as ``data-`` attributes."""
    inputs = model["inputs"]
    pictures = [spec for spec in inputs.values() if spec["type"] == "image"]
    takes = {
        "negative": "negative_prompt" in inputs,
        "image": bool(pictures),
        "needs": any(spec["required"] for spec in pictures),
        "pictures": not model["videos"],
        "videos": model["videos"],
        "seconds": model["videos"] and model["fps"] is not None,
        "steps": "steps" in inputs,
    }
    marks = "".join(f" data-{name}" for name, is_taken in takes.items() if is_taken)
    return f"<option{marks}>{html.escape(model['id'])}</option>"


def _verdict(model: dict[str, Any]) -> str:
    plan = model["plan"]
    return (
        "is being planned"
        if plan is None
        else plan["verdict"]
        if plan["fits"]
        else f"does not fit: {plan['verdict']}"
    )
