"""The certificate of the HTTP port, which is read again when its files change: connections that are open stay so."""

import logging
import ssl

from funitel.proto.errors import SettingsError
from funitel.proto.security.tls import Pair, server_context
from funitel.router.core.file_watch import FileWatch

logger = logging.getLogger(__name__)


class Https:
    """A server's context. Raises SettingsError for files that are not what they must be."""

    def __init__(self, pair: Pair, client_ca: str | None) -> None:
        self._pair = pair
        self._client_ca = client_ca
        self._watch = FileWatch(pair.cert, pair.key)
        self.context: ssl.SSLContext = server_context(pair, client_ca)

    @classmethod
    def of(cls, cert: str | None, key: str | None, client_ca: str | None) -> "Https | None":
        """Of the settings; None where HTTP is plain."""
        return None if cert is None or key is None else cls(Pair(cert, key), client_ca)

    def refresh(self) -> None:
        """Show the new certificate from now on, if there is one; a pair that does not fit changes only the log."""
        if not self._watch.has_changed():
            return
        try:
            server_context(self._pair, self._client_ca)  # else the live context would be left with half of a pair
            self._pair.load_into(self.context)
        except SettingsError as error:
            logger.error("the certificate stays as it was: %s", error.message)
        else:
            logger.info("certificate read again: %s", self._pair.cert)
