"""A figure of matplotlib as a part of an HTML page.

The invariant owned here: what comes out is an `<svg>` element with text as text, which asks for nothing from outside
and whose ids are in no other figure of the page.
"""

from __future__ import annotations

import io
import re
from xml.etree import ElementTree

from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure


SVG, XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
# Text as text can be read out, searched and copied. It is laid out for DejaVu Sans, which is wider than the fonts that
# a browser takes where there is none, so nothing overlaps there either.
SETTINGS = {"svg.fonttype": "none", "svg.hashsalt": "trl-april", "font.family": "DejaVu Sans", "font.size": 9.0}


def to_svg(figure: Figure, *, name: str, kind: str, label: str) -> str:
    """
    Writes a figure as an SVG element that is as wide as its place.

    Args:
        figure (`Figure`):
            The figure.
        name (`str`):
            Letters that go in front of every id; another in each figure of a page.
        kind (`str`):
            Its class, for CSS.
        label (`str`):
            What a screen reader says of it.
    """
    buffer = io.BytesIO()
    # Not savefig, which lays everything out twice.
    nothing = {"Date": None, "Creator": None, "Format": None, "Type": None}
    FigureCanvasSVG(figure).print_svg(buffer, metadata=nothing)  # type: ignore[no-untyped-call]
    root = ElementTree.fromstring(buffer.getvalue())
    for child in root.findall(f"{{{SVG}}}metadata"):
        root.remove(child)
    for element in root.iter():
        if "id" in element.attrib:
            element.set("id", f"{name}-{element.attrib['id']}")
        for key, value in element.attrib.items():
            if key == f"{{{XLINK}}}href":
                element.set(key, value.replace("#", f"#{name}-", 1))
            elif "url(#" in value:
                element.set(key, re.sub(r"url\(#", f"url(#{name}-", value))
    for size in ("width", "height"):
        root.attrib.pop(size, None)  # the viewBox has them, too
    root.set("class", kind)
    root.set("role", "img")
    root.set("aria-label", label)
    ElementTree.register_namespace("", SVG)
    ElementTree.register_namespace("xlink", XLINK)
    return ElementTree.tostring(root, encoding="unicode")
