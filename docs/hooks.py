"""For mkdocs: links to files of the repository outside of docs/ become their paths."""

from __future__ import annotations

import re
from typing import Any

UPWARDS = re.compile(r"\[[^\]]+\]\(((?:\.\./)+)([^)]*)\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    depth = page.file.src_uri.count("/") + 1

    def shown(found: re.Match[str]) -> str:
        inside = found[1].count("../") < depth
        return found[0] if inside else f"`{found[2]}`"

    return UPWARDS.sub(shown, markdown)
