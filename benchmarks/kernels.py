"""Run `funitel bench kernels`."""

import sys

from funitel.model_server.__main__ import main

if __name__ == "__main__":
    sys.argv[1:1] = ["bench-kernels"]
    main()
