"""Which network addresses media may come from. Pure; `app.fetch` asks before it connects."""

from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
)
from typing import Final

Address = IPv4Address | IPv6Address

_NAT64: Final = IPv6Network("64:ff9b::/96")
# Instance metadata: never fetched from, not even with --allow-private-media.
_METADATA: Final = frozenset(
    ip_address(text) for text in ("100.100.100.200", "fd00:ec2::254", "168.63.129.16", "192.0.0.192")
)
_THIS_NETWORK: Final = IPv4Network("0.0.0.0/8")


def may_connect(address: Address, *, allow_private: bool) -> bool:
    """Whether media may be fetched from this address.

    Never: link-local (169.254.169.254 is where clouds keep credentials), metadata, multicast, unspecified.
    Only with allow_private: loopback, RFC 1918, carrier NAT, ULA, everything else that is not global.
    An IPv6 address that carries an IPv4 one is judged by both.
    """
    embedded = _embedded_ipv4(address)
    if embedded is not None and not may_connect(embedded, allow_private=allow_private):
        return False
    if address.is_link_local or address.is_multicast or address.is_unspecified or address in _METADATA:
        return False
    if isinstance(address, IPv4Address) and address in _THIS_NETWORK:
        return False
    if allow_private:
        return True
    if embedded is not None and _only_carries(address):
        return True
    return address.is_global and not address.is_reserved


def _only_carries(address: Address) -> bool:
    """Forms that are reserved as such, and reach what the IPv4 address in them reaches."""
    return isinstance(address, IPv6Address) and (address.ipv4_mapped is not None or address in _NAT64)


def _embedded_ipv4(address: Address) -> IPv4Address | None:
    if not isinstance(address, IPv6Address):
        return None
    if address in _NAT64:
        return IPv4Address(int(address) & 0xFFFFFFFF)
    teredo = address.teredo
    return address.ipv4_mapped or address.sixtofour or (teredo[1] if teredo else None)
