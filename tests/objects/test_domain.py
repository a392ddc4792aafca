"""Thread and parent domains, on the device in software."""

from __future__ import annotations

import ctypes

import pytest
from software import Device, Software

from rdmaconnect.abi import QpType
from rdmaconnect.errors import LibraryError, StateError, VerbsError
from rdmaconnect.objects.completion import CQ
from rdmaconnect.objects.completion_ex import CQEx
from rdmaconnect.objects.context import open_device
from rdmaconnect.objects.domain import TD, Allocator, ParentDomain
from rdmaconnect.objects.memory import PD
from rdmaconnect.objects.operations import check_open
from rdmaconnect.objects.queuepair import QueuePair


def test_a_parent_domain_goes_where_a_protection_domain_goes(software: Software) -> None:
    with open_device("soft0") as context, PD(context) as pd, TD(context) as td:
        with ParentDomain(pd, td) as domain:
            assert domain.td is td
            assert domain.base is pd.base is pd
            with CQEx(context, 8, parent_domain=domain) as cq, domain.register(bytearray(8)) as mr:
                made = QueuePair(domain, cq, cq, QpType.RC, max_send_wr=4, max_recv_wr=4)
                # what is made in the domain and what is made in the one that it stands for work together
                with pd.register(bytearray(8)) as plain:
                    check_open(plain, made)
                    check_open(mr, made)
                with (
                    PD(context) as other,
                    other.register(bytearray(8)) as foreign,
                    pytest.raises(ValueError, match="is of another protection domain"),
                ):
                    check_open(foreign, made)
                assert software.alive["parent_domain"] == 1
        assert made.closed
        assert cq.closed
        assert mr.closed


def test_closing_goes_down_from_the_thread_domain_too(software: Software) -> None:
    with open_device("soft0") as context:
        pd, td = PD(context), TD(context)
        domain = ParentDomain(pd, td)
        td.close()
        assert domain.closed
        with pytest.raises(StateError, match="thread domain of soft0 is closed"):
            ParentDomain(pd, td)
        with ParentDomain(pd) as alone:
            assert alone.td is None
        pd.close()


def test_a_parent_domain_of_a_parent_domain_stands_for_the_first(software: Software) -> None:
    with open_device("soft0") as context, PD(context) as pd, ParentDomain(pd) as one, ParentDomain(one) as two:
        assert two.base is pd


def test_domains_of_two_devices_do_not_go_together() -> None:
    with Software([Device("soft0"), Device("soft1")]) as software:
        with (
            open_device("soft0") as one,
            open_device("soft1") as two,
            PD(one) as pd,
            TD(two) as td,
            pytest.raises(ValueError, match="thread domain of soft1 is of another device"),
        ):
            ParentDomain(pd, td)
        assert software.problems() == []


def test_what_the_provider_lacks_is_said(software: Software) -> None:
    with open_device("soft0") as context, PD(context) as pd:
        for verb, make in (
            ("ibv_alloc_td", lambda: TD(context)),
            ("ibv_alloc_parent_domain", lambda: ParentDomain(pd)),
        ):
            with software.on(verb, fail=95), pytest.raises(LibraryError, match=f"{verb}: EOPNOTSUPP"):
                make()
        assert CQ(context, 1).close() is None


def test_memory_comes_from_the_caller_s_allocator_and_goes_back(software: Software) -> None:
    page = ctypes.create_string_buffer(4096)
    asked: list[tuple[int, ...]] = []
    freed: list[tuple[int, int]] = []

    def alloc(size: int, alignment: int, resource_type: int) -> int | None:
        asked.append((size, alignment, resource_type))
        return ctypes.addressof(page) if len(asked) == 1 else None

    with open_device("soft0") as context, PD(context) as pd:
        allocator = Allocator(alloc, lambda address, resource_type: freed.append((address, resource_type)))
        with ParentDomain(pd, allocator=allocator):
            assert (asked, freed) == ([(4096, 64, 7 << 32)], [])
        assert freed == [(ctypes.addressof(page), 7 << 32)]
        with ParentDomain(pd, allocator=allocator):  # the provider's own way
            assert len(asked) == 2
        assert len(freed) == 1


def test_an_allocator_that_fails_is_no_memory(software: Software) -> None:
    def alloc(size: int, alignment: int, resource_type: int) -> int | None:
        if domains:
            raise MemoryError("none left")
        return None

    def free(address: int, resource_type: int) -> None:
        raise AssertionError("nothing was given")

    domains: list[ParentDomain] = []
    with (
        open_device("soft0") as context,
        PD(context) as pd,
        ParentDomain(pd, allocator=Allocator(alloc, free)) as first,
    ):
        domains.append(first)
        other = ParentDomain.__new__(ParentDomain)
        with pytest.raises(VerbsError, match="allocate a parent domain: ibv_alloc_parent_domain: ENOMEM"):
            other.__init__(pd, allocator=Allocator(alloc, free))  # type: ignore[misc]
        assert first.refusal is None
        assert str(other.refusal) == "none left"
    assert software.alive["parent_domain"] == 0
