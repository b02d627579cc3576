"""Write the made parts of all pages, and the plots: ``python docs/tables``. With ``--check`` only name what is stale, and fail."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tables import PAGES, filled
from tables.makers import MAKERS
from tables.plots import draw
from tables.plots import stale as stale_plots

check = "--check" in sys.argv[1:]
stale = []
for page in PAGES:
    text = page.read_text(encoding="utf-8")
    made = filled(text, MAKERS)
    if made != text:
        stale.append(page.name)
        if not check:
            page.write_text(made, encoding="utf-8")
for name in stale_plots():
    stale.append(f"{name}.svg")
    if not check:
        draw(name)
print(f"{'stale' if check else 'wrote'}: {', '.join(stale) or 'none'}")
if check and stale:
    sys.exit("run python docs/tables")
