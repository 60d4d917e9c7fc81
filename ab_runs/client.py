"""The few HTTP calls that a comparison makes of a server, over the standard library."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from typing import Any


class CallError(Exception):
    """A call that got no usable answer. The message says which call and what came back."""


def call(url: str, body: dict[str, Any] | None = None, timeout: float = 600) -> Any:
    """GET, or POST of ``body`` as JSON; the JSON answer. Raises CallError."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return json.loads(answer.read())
    except urllib.error.HTTPError as error:
        said = error.read().decode(errors="replace")[:500]
        raise CallError(f"{url}: HTTP {error.code}: {said}") from error
    except (OSError, ValueError) as error:
        raise CallError(f"{url}: {error}") from error


def served_model(url: str) -> str:
    """The name under which the server serves its model."""
    try:
        return str(call(f"{url}/v1/models", timeout=30)["data"][0]["id"])
    except (KeyError, IndexError, TypeError) as error:
        raise CallError(f"{url}/v1/models: names no model") from error


_LINE = re.compile(r"^(?P<name>[A-Za-z_:][\w:]*)(\{.*\})?\s+(?P<value>[-+0-9.eEinfNa]+)\s*$")


def metrics(url: str) -> dict[str, float]:
    """Prometheus counters and gauges by name, summed over their labels; empty where there are none."""
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
            text = answer.read().decode(errors="replace")
    except OSError:
        return {}
    return parse_metrics(text)


def parse_metrics(text: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for line in text.splitlines():
        match = _LINE.match(line)
        if match:
            name = match["name"].removesuffix("_total")
            found[name] = found.get(name, 0.0) + float(match["value"])
    return found
