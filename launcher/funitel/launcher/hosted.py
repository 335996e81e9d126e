"""Run a launcher that ends with the client that started it: `python -m funitel.launcher.hosted CLIENT_PID FLAGS`."""

import sys

from funitel.launcher.__main__ import main
from funitel.proto.process.parent import stop_with_parent

if __name__ == "__main__":
    stop_with_parent(int(sys.argv.pop(1)))
    main()
