"""Records of the routes of users, keys and usage, as the control plane reads and writes them."""

from typing import Any

from pydantic import Field

from funitel.router.api.common.schema_base import ApiModel, Body

NAME = "1 to 64 letters, digits or `._@-`, of which the first is a letter or a digit."
ROLE = "`user`, `operator` or `admin`."


class LimitsOfTenant(Body):
    """What a user or a key may use; null is no limit. Months are those of UTC."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = Field(default=None, description="Of prompts and completions.")
    max_concurrent_requests: int | None = None
    requests_per_month: int | None = None
    tokens_per_month: int | None = Field(default=None, description="Of prompts and completions.")
    budget_per_month: float | None = Field(default=None, description="The cost of tokens by the prices of models.")


class NewUser(Body):
    """A user to add."""

    name: str = Field(description=NAME)
    role: str | None = Field(default=None, description=ROLE)
    password: str | None = Field(default=None, description="Without one the user has keys, and cannot log in.")
    limits: LimitsOfTenant | None = None


class UserChange(Body):
    """What changes of a user."""

    role: str | None = Field(default=None, description=ROLE)
    limits: LimitsOfTenant | None = None
    is_disabled: bool | None = None


class NewPassword(Body):
    """A password to set."""

    password: str
    current_password: str | None = Field(default=None, description="Of a user that changes its own.")


class TenantUser(ApiModel):
    """A user."""

    name: str
    role: str = Field(description=ROLE)
    limits: LimitsOfTenant
    created: float = Field(description="Unix time.")
    is_disabled: bool
    subject: str | None = Field(description="Issuer and subject of OpenID Connect.")
    has_password: bool


class TenantUsers(ApiModel):
    """The users that one may see."""

    users: list[TenantUser]


class NewKey(Body):
    """A key to make."""

    name: str = Field(description=NAME)
    user: str | None = Field(default=None, description="The user that it belongs to; the one that asks if absent.")
    routes: list[str] | None = Field(default=None, description="Paths that it may use, such as `/v1/*`.")
    models: list[str] | None = None
    limits: LimitsOfTenant | None = None
    group: str | None = Field(default=None, description="Keys of one group share cached prefixes.")
    expires: float | str | None = Field(default=None, description="Unix time, or a date and time.")


class KeyChange(Body):
    """What changes of a key; null lifts a bound."""

    name: str | None = None
    routes: list[str] | None = None
    models: list[str] | None = None
    limits: LimitsOfTenant | None = None
    group: str | None = None
    expires: float | str | None = None
    is_banned: bool | None = None


class ImportedKeys(Body):
    """Lines of a file of keys, which become keys of a user."""

    user: str
    lines: list[str]


class ApiKey(ApiModel):
    """A key, without its text."""

    id: int
    name: str
    user: str
    hint: str = Field(description="The last characters of the key.")
    routes: list[str]
    models: list[str]
    limits: LimitsOfTenant
    group: str | None
    created: float
    expires: float | None
    revoked: float | None
    is_banned: bool
    is_managed: bool = Field(description="An admin has set its bounds, and alone changes them.")


class ApiKeyWithText(ApiKey):
    """A key with its text, which is shown this once."""

    key: str


class ApiKeys(ApiModel):
    """The keys that one may see."""

    keys: list[ApiKey]


class KeysQuery(ApiModel):
    """Keys of which user."""

    user: str | None = None


class ModelPrice(Body):
    """The price of a model's tokens, per million."""

    model: str
    prompt: float = Field(ge=0)
    completion: float = Field(ge=0)


class ModelPrices(ApiModel):
    """The prices of models."""

    prices: list[ModelPrice]


class UsageQuery(ApiModel):
    """Days of UTC, both included, and a user."""

    first: str | None = None
    last: str | None = None
    user: str | None = None


class UsageRow(ApiModel):
    """What was used of a model with a key on a day."""

    day: str
    user: str
    key: int = Field(description="Its id; 0 for sessions.")
    key_name: str
    model: str
    requests: int
    prompt_tokens: int
    completion_tokens: int
    unsettled_tokens: int = Field(description="Reserved by requests whose end is not known; they count as used.")
    cost: float


class UsageList(ApiModel):
    """Usage by day, user, key and model."""

    first: str
    last: str
    usage: list[UsageRow]


class AuditQuery(ApiModel):
    """Which rows of the audit."""

    limit: int | None = None
    before: int | None = Field(default=None, description="Rows of a lower place.")
    actor: str | None = None
    object: str | None = None


class AuditEntry(ApiModel):
    """A change of state, or the try of one."""

    place: int
    at: float
    actor: str
    role: str
    via: str = Field(description="The key or the session by which the actor came.")
    address: str
    action: str
    object: str
    before: dict[str, Any] | None
    after: dict[str, Any] | None
    status: int | None = Field(description="Null where the change began and its end is not known.")


class AuditList(ApiModel):
    """Rows of the audit, newest first."""

    audit: list[AuditEntry]


class Login(Body):
    """Name and password of a user."""

    name: str
    password: str


class SessionState(ApiModel):
    """The session of a browser; `user` is null where it has none."""

    has_users: bool = Field(default=True, description="Whether the server was started with `--users`.")
    user: TenantUser | None = None
    csrf_token: str | None = Field(
        default=None, description="For the header `x-funitel-csrf` of requests that change something."
    )
    expires: float | None = None
    has_oidc: bool | None = None
