"""In PYTHONPATH: a process speaks the version of the keeper's messages that a file names when it is started.

The variable VERSION_FILE names the file: so code of another version is installed while a server runs.
"""

import os
from pathlib import Path

from funitel.proto.keeper import messages

messages.VERSION = int(Path(os.environ["VERSION_FILE"]).read_text())
messages.RouterHello.__init__.__defaults__ = (False, messages.VERSION)  # type: ignore[misc]
