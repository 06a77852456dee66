"""Who asks: API keys to tenants, and tenants to the salt that separates their block names."""

import hashlib
import hmac
import ipaddress
from collections.abc import Iterable

from starlette.requests import Request

from headrace.errors import NotAuthenticated
from headrace.router.http.errors import NotAllowed


class Tenants:
    """Keys are kept and compared as digests, so neither timing nor a dump of this object gives one away."""

    def __init__(self, api_keys: Iterable[str], admin_key: str) -> None:
        """`api_keys` as `key` or `key=tenant`. A key without a tenant is a tenant of its own."""
        self._tenants: dict[bytes, str] = {}
        for entry in api_keys:
            key, _, tenant = entry.partition("=")
            self._tenants[_digest(key)] = tenant or f"key-{_digest(key).hex()[:16]}"
        self._admin = _digest(admin_key) if admin_key else None

    def tenant(self, request: Request) -> str:
        """The tenant of a request; "" for all of them when no keys are configured. Raises NotAuthenticated."""
        if not self._tenants:
            return ""
        key = _presented_key(request)
        if not key:
            raise NotAuthenticated("no API key: send it as `Authorization: Bearer KEY`")
        tenant = self._tenants.get(_digest(key))
        if tenant is None:
            raise NotAuthenticated("wrong API key")
        return tenant

    def scope(self, request: Request) -> str | None:
        """Whose requests may be looked at: those of the key's tenant, everybody's (None) for an administrator. Raises
        NotAuthenticated or NotAllowed."""
        tenant = self._tenants.get(_digest(_presented_key(request))) if self._tenants else None
        if tenant is None:
            self.check_admin(request)
        return tenant

    def check_admin(self, request: Request) -> None:
        """Raises NotAuthenticated or NotAllowed."""
        if self._admin is None:
            if not _is_loopback(request):
                raise NotAllowed("admin endpoints answer on loopback only while router.admin_key is empty")
        elif not hmac.compare_digest(_digest(_presented_key(request)), self._admin):
            raise NotAuthenticated("wrong or missing admin key")


def tenant_salt(tenant: str) -> bytes:
    """Part of the root of the tenant's block names, equal in every router and after every restart. A client never
    names a block, so the salt only has to differ between tenants, and no field of a request reaches it."""
    return hashlib.sha256(b"headrace tenant\0" + tenant.encode()).digest()


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def _presented_key(request: Request) -> str:
    scheme, _, value = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    return request.headers.get("x-api-key", "").strip()


def _is_loopback(request: Request) -> bool:
    if request.client is None:
        return True
    try:
        return ipaddress.ip_address(request.client.host).is_loopback
    except ValueError:
        return False
