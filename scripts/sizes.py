"""Source lines by folder, and an error for a file that has grown past what one can read.

Also refuses what an editor lets slip: non-ASCII characters and lines over 100 columns.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

MOST_LINES, MOST_COLUMNS = 400, 100


def problems(path: Path, text: str) -> list[str]:
    lines = text.splitlines()
    found = []
    if len(lines) > MOST_LINES:
        found.append(f"{path}: {len(lines)} lines; a file may have {MOST_LINES}")
    for number, line in enumerate(lines, 1):
        if not line.isascii():
            found.append(f"{path}:{number}: not ASCII; write an escape")
        if len(line) > MOST_COLUMNS:
            found.append(f"{path}:{number}: {len(line)} columns; a line may have {MOST_COLUMNS}")
    return found


def main() -> int:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    sizes: Counter[str] = Counter()
    found: list[str] = []
    for name in sorted(set(listed)):
        path = Path(name)
        if not path.exists():
            continue
        text = path.read_text(encoding="utf-8")
        sizes[path.parts[0] if len(path.parts) > 1 else "."] += len(text.splitlines())
        found += problems(path, text)
    for folder, lines in sorted(sizes.items()):
        print(f"{lines:7d}  {folder}")
    print(f"{sum(sizes.values()):7d}  in all")
    for problem in found:
        print(problem, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
