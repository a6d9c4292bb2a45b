"""For mkdocs: links between docs/ and the rest of the repository.

Links out of docs/ become paths. CONTRIBUTING.md, which a page includes, has links into
docs/, which lose that folder.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

INCLUDED = Path(__file__).parents[1] / "CONTRIBUTING.md"
UPWARDS = re.compile(r"\[[^\]]+\]\(((?:\.\./)+)([^)]*)\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    if page.file.src_uri == "contributing.md":
        return INCLUDED.read_text().replace("](docs/", "](")
    depth = page.file.src_uri.count("/") + 1

    def shown(found: re.Match[str]) -> str:
        inside = found[1].count("../") < depth
        return found[0] if inside else f"`{found[2]}`"

    return UPWARDS.sub(shown, markdown)
