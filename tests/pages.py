"""What a report page holds, read as strictly as a browser that forgives nothing."""

import html.parser
import json
import re

from plotly.offline import get_plotlyjs

NASTY = "<b>\"'&amp;</script><script>alert(1)</script>$x$%{z}"
"""Text that is markup to a page, a tag, a formula or a template to plotly."""


class Elements(html.parser.HTMLParser):
    """Collects a page's elements and its visible text."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.attributes, self.words, self.ids = [], [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        self.ids += [value for name, value in attrs if name == "id"]

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


def without_library(page):
    """The page with plotly.js, which has addresses and tags of its own, cut out."""
    library = get_plotlyjs()
    assert page.count(library) <= 1
    return page.replace(library, "")


def figures_of(page):
    """The (id, data, layout) of each figure, read from its call by a strict parser."""

    def refuse(token):
        raise AssertionError(f"not strict JSON: {token}")

    decoder = json.JSONDecoder(parse_constant=refuse)
    found, body = [], without_library(page)
    for call in re.finditer(r'draw\("(fig-\d+)", ', body):
        data, end = decoder.raw_decode(body, call.end())
        layout, end = decoder.raw_decode(body, end + len(", "))
        # Nothing in a script may look like the end of it.
        assert "<" not in body[call.end() : end]
        found.append((call.group(1), data, layout))
    return found


def strict(figure):
    """A figure's JSON, if it is strict and hides no numbers in base64."""
    text = json.dumps(figure.to_plotly_json(), allow_nan=False)
    assert "bdata" not in text
    return json.loads(text)
