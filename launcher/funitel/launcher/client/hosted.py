"""A launcher that ends with the client that started it: `python -m funitel.launcher.client.hosted FLAGS`."""

from funitel.launcher.__main__ import main
from funitel.proto.parent import stop_with_parent

if __name__ == "__main__":
    stop_with_parent()
    main()
