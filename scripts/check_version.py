"""Check that pyproject.toml and the newest entry of CHANGELOG.md have the same version."""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent


def main() -> int:
    packaged = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    entry = re.search(r"^## \[([^\]]+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    logged = entry[1] if entry else "nothing"
    if packaged != logged:
        print(f"error: pyproject.toml says {packaged}, CHANGELOG.md begins with {logged}", file=sys.stderr)
    return int(packaged != logged)


if __name__ == "__main__":
    sys.exit(main())
