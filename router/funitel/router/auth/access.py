"""What a route asks for: `Access`, of a row of the table of routes."""

from enum import Enum

from funitel.proto.security.roles import Role


class Access(Enum):
    """What a route asks for where there are API keys."""

    KEY = "a key that is for the route"
    OWN = "a session, or a key with the very path among its routes: the route is about what the user has"
    OPERATOR = "an operator's session, the key that is a setting, or one with the very path among its routes"
    ADMIN = "an admin's session, the key that is a setting, or one with the very path among its routes"
    FACT = "no key: the route tells what the server is, and does nothing"
    CLOSED_FACT = "a key that is for the route; answered as long as the port answers, draining or not"
    LOGIN = "no key: the route begins or ends a session"
    CONTINUED = "the key of the request that it continues: routes and limits of the key were checked then"
    PROBE = "no key: health checks have none"

    @property
    def role(self) -> Role | None:
        """The role that a user must have; None for any."""
        return {Access.OPERATOR: Role.OPERATOR, Access.ADMIN: Role.ADMIN}.get(self)

    @property
    def needs_very_path(self) -> bool:
        """Whether a key must list the path itself, without a pattern."""
        return self in (Access.OWN, Access.OPERATOR, Access.ADMIN)
