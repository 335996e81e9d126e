"""Roles of users: what each may do."""

from enum import StrEnum


class Role(StrEnum):
    """A role; each includes those before it."""

    USER = "user"  # uses models, and has keys of its own
    OPERATOR = "operator"  # launches and changes models, too, and sees the requests of all
    ADMIN = "admin"  # changes users, keys, limits and prices of all, too, and reads the audit

    def includes(self, other: "Role") -> bool:
        """Whether this role may do what another may."""
        roles = list(Role)
        return roles.index(self) >= roles.index(other)
