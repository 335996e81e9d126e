"""`python -m funitel` runs the launcher."""

from funitel.launcher.__main__ import main

if __name__ == "__main__":
    main()
