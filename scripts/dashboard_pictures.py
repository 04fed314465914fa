"""Pictures of the Ray dashboard as it shows a running application: the Serve page and the actors.

    python scripts/dashboard_pictures.py --into docs/pictures [--chromium PATH]

Not part of the product's dependencies: `pip install playwright`, and a Chromium: any that is on
the path, or `npm i @sparticuz/chromium` where none may be installed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

PAGES = {"serve": "/#/serve", "actors": "/#/actors"}
SIZE = {"width": 1280, "height": 840}
SETTLED_MS = 3000  # the pages fill in what they ask for after they have loaded
LARGEST = 150_000  # bytes; they live in the repository
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--into", type=Path, default=Path("docs/pictures"))
    parser.add_argument(
        "--dashboard",
        default=os.environ.get("RAY_API_SERVER_ADDRESS", "http://127.0.0.1:8265"),
        help="URL (default: RAY_API_SERVER_ADDRESS, else %(default)s)",
    )
    parser.add_argument(
        "--chromium",
        default=next(filter(None, map(shutil.which, BROWSERS)), None),
        help="the browser (default: the one on the path)",
    )
    options = parser.parse_args()
    if options.chromium is None:
        print("no Chromium on the path; name one with --chromium", file=sys.stderr)
        return 1
    try:
        from playwright.sync_api import sync_playwright  # type: ignore[import-not-found]
    except ImportError:
        print("playwright is not installed: pip install playwright", file=sys.stderr)
        return 1
    options.into.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        flags = ["--no-sandbox", "--headless=new", "--disable-gpu"]
        browser = playwright.chromium.launch(executable_path=options.chromium, args=flags)
        page = browser.new_page(viewport=SIZE)
        for picture, path in PAGES.items():
            page.goto(options.dashboard + path)
            page.wait_for_timeout(SETTLED_MS)
            file = options.into / f"dashboard_{picture}.png"
            page.screenshot(path=str(file))
            print(f"{file}: {file.stat().st_size} bytes")
            if file.stat().st_size > LARGEST:
                print(f"{file} is larger than {LARGEST} bytes", file=sys.stderr)
                return 1
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
