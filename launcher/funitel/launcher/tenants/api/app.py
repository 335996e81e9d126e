"""The application of the control socket: that of models, the routes of tenants, and the audit around all of them."""

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import Route

from funitel.launcher.control_plane.api.app import build_app
from funitel.launcher.control_plane.interface import Fleet
from funitel.launcher.control_plane.model_tools import ModelTools
from funitel.launcher.settings import LauncherSettings
from funitel.launcher.tenants.api import accounts, login, router_side
from funitel.launcher.tenants.api.audited import Audited
from funitel.launcher.tenants.oidc import OidcProvider, OidcSettings, provider_of, read_secret
from funitel.launcher.tenants.service import Tenants

ROUTES: tuple[Route, ...] = (*router_side.ROUTES, *login.ROUTES, *accounts.ROUTES)


def app_of(settings: LauncherSettings, fleet: Fleet, tools: ModelTools, tenants: Tenants) -> Starlette:
    """Make the application.

    Raises:
        SettingsError: the settings of the provider of OpenID Connect are wrong.
        MissingPackage: its extra is not installed.
    """
    around = [Middleware(Audited, fleet=fleet, note=tenants.note)]
    return build_app(fleet, tools, ROUTES, around, {"tenants": tenants, "oidc": _provider_of(settings)})


def _provider_of(settings: LauncherSettings) -> OidcProvider | None:
    if settings.oidc_issuer is None:
        return None
    return provider_of(
        OidcSettings(
            issuer=settings.oidc_issuer,
            client_id=settings.oidc_client_id,
            client_secret=read_secret(settings.oidc_client_secret_file),
            redirect_url=settings.oidc_redirect_url,
            role_claim=settings.oidc_role_claim,
        )
    )
