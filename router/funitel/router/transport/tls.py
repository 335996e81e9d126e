"""TLS of the HTTP port: the certificate is reloaded when its files change; open connections stay."""

import logging
import ssl

from funitel.proto.errors import SettingsError
from funitel.proto.security.tls import Pair, server_context
from funitel.router.core.file_watch import FileWatch

logger = logging.getLogger(__name__)


class Https:
    """The TLS context of a server. Raises SettingsError for files that are not valid."""

    def __init__(self, pair: Pair, client_ca: str | None) -> None:
        self._pair = pair
        self._client_ca = client_ca
        self._watch = FileWatch(pair.cert, pair.key)
        self.context: ssl.SSLContext = server_context(pair, client_ca)
        self._newest = self.context
        self.context.sni_callback = self._choose

    @classmethod
    def of(cls, cert: str | None, key: str | None, client_ca: str | None) -> "Https | None":
        """Make it from the settings; None for plain HTTP."""
        return None if cert is None or key is None else cls(Pair(cert, key), client_ca)

    def refresh(self) -> None:
        """Reload the certificate if its files have changed; a pair that does not match is only logged.

        A context in use is never changed: it would hold the new certificate with the old key for an instant, and the
        handshakes of that instant would fail.
        """
        if not self._watch.has_changed():
            return
        try:
            self._newest = server_context(self._pair, self._client_ca)
        except SettingsError as error:
            logger.error("the certificate stays as it was: %s", error.message)
        else:
            logger.info("certificate read again: %s", self._pair.cert)

    def _choose(self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        """Called in each handshake, with or without a server name."""
        connection.context = self._newest
