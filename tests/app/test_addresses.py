"""app.addresses: which addresses media may come from."""

from __future__ import annotations

from ipaddress import ip_address

import pytest

from app.addresses import may_connect

PUBLIC = ["93.184.216.34", "8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"]
PRIVATE = [
    "127.0.0.1", "127.8.8.8", "10.0.0.1", "172.16.0.1", "192.168.1.1", "100.64.0.1", "198.18.0.1",
    "192.0.2.1", "240.0.0.1", "255.255.255.255", "::1", "fc00::1", "fd12::1", "2001:db8::1",
    "::ffff:127.0.0.1", "::ffff:10.0.0.1", "2002:7f00:1::", "64:ff9b::7f00:1",
]  # fmt: skip
NEVER = [
    "169.254.169.254", "169.254.0.1", "fe80::1", "::ffff:169.254.169.254", "64:ff9b::a9fe:a9fe",
    "2002:a9fe:a9fe::", "100.100.100.200", "fd00:ec2::254", "0.0.0.0", "0.1.2.3", "::", "224.0.0.1",
    "ff02::1", "::ffff:0.0.0.0",
]  # fmt: skip


@pytest.mark.parametrize("text", PUBLIC)
def test_public_addresses_are_open(text: str) -> None:
    assert may_connect(ip_address(text), allow_private=False)


@pytest.mark.parametrize("text", PRIVATE)
def test_private_addresses_need_the_option(text: str) -> None:
    assert not may_connect(ip_address(text), allow_private=False)
    assert may_connect(ip_address(text), allow_private=True)


@pytest.mark.parametrize("text", NEVER)
def test_link_local_and_metadata_addresses_are_never_open(text: str) -> None:
    assert not may_connect(ip_address(text), allow_private=False)
    assert not may_connect(ip_address(text), allow_private=True)
