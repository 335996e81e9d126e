"""Print pip's settings of indexes and certificates as shell lines that give uv, which reads none of them, the same."""

import ast
import os
import shlex
import subprocess
import sys

UV_VARIABLES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "cert": "SSL_CERT_FILE",
}
SEPARATORS = {"UV_FIND_LINKS": ","}


def main() -> None:
    """Read `pip config list`, in which later lines take precedence."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    values = {"UV_INDEX_STRATEGY": "unsafe-best-match"}  # pip's: the best release of all indexes
    for line in lines:
        name, _, value = line.partition("=")
        variable = UV_VARIABLES.get(name.removeprefix(":env:").rpartition(".")[2])
        if variable:
            values[variable] = SEPARATORS.get(variable, " ").join(ast.literal_eval(value).split())
    if os.environ.get("PIP_NO_CACHE_DIR"):
        values["UV_NO_CACHE"] = "1"
    for variable, value in values.items():
        if variable not in os.environ:
            print(f"export {variable}={shlex.quote(value)}")


if __name__ == "__main__":
    main()
