"""Run `funitel bench`."""

import sys

from funitel.launcher.__main__ import main

if __name__ == "__main__":
    sys.argv[1:1] = ["bench"]
    main()
