"""What a stranger could use is shown nowhere: a repr ends up in logs and in reports of faults."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any, cast

import pytest
from samples import ID, end, infiniband

import rdmaconnect
from rdmaconnect.abi import Mtu, QpType, ibv_qp_attr
from rdmaconnect.agreement.options import Options
from rdmaconnect.agreement.path import Wish, agree, make_path
from rdmaconnect.exchange.curve import keys_for
from rdmaconnect.objects.address import AddressHandle, UdAddress
from rdmaconnect.objects.qp_attr import QpAttr
from rdmaconnect.protocol.messages import Hello, Reply
from rdmaconnect.session.terms import make_terms

QKEY = 0x5EC2E7A1
SECRET = "a secret of one job, long enough"
HERE, THERE = (end(infiniband(lid), qp_type=QpType.UD, qkey=QKEY) for lid in (5, 6))
AGREED = agree(HERE, THERE, Wish())

#: one of each value that holds a Q_Key, as users and logs see them
WITH_QKEY = [
    HERE,
    make_path(HERE, THERE, AGREED, Options(), connector=True),
    Hello(ID, (HERE,), Wish(), {}),
    Reply(ID, (THERE,), AGREED, {}),
    UdAddress(cast(AddressHandle, None), 7, QKEY),
    QpAttr.of(ibv_qp_attr(qkey=QKEY, path_mtu=Mtu.MTU_1024)),
]


@pytest.mark.parametrize("value", WITH_QKEY, ids=lambda value: type(value).__name__)
def test_no_repr_shows_a_q_key(value: Any) -> None:
    held = value.ends[0] if hasattr(value, "ends") else value
    assert QKEY in (getattr(held, "qkey", None), getattr(held, "remote_qkey", None)), "code of one's own can have it"
    for words in (repr(value), str(value), f"{value}", f"{[value]}"):
        assert str(QKEY) not in words
        assert f"{QKEY:x}" not in words.lower()


@pytest.mark.parametrize("listens", [True, False])
def test_no_repr_shows_a_secret(listens: bool) -> None:
    keys = keys_for(listens=listens, secret=SECRET)
    assert keys is not None
    terms = make_terms({"secret": SECRET}, listens=listens)
    for words in (repr(keys), str(keys), f"{[keys]}", repr(terms)):
        assert SECRET not in words
        assert keys.secret.decode() not in words


def classes() -> Iterator[type]:
    for found in pkgutil.walk_packages(rdmaconnect.__path__, "rdmaconnect."):
        if found.name != "rdmaconnect.__main__":
            module = importlib.import_module(found.name)
            yield from (kind for kind in vars(module).values() if isinstance(kind, type))


def hidden(name: str) -> bool:
    """Whether a field of that name is nothing to show."""
    return name.endswith("qkey") or "secret" in name or "token" in name


def test_no_value_has_a_field_that_would_be_shown() -> None:
    dataclass_fields = {(kind, f.name, f.repr) for kind in classes() if dataclasses.is_dataclass(kind)
                        for f in dataclasses.fields(kind)}  # fmt: skip
    assert {(kind, name) for kind, name, shown in dataclass_fields if shown and hidden(name)} == set()
    assert {name for _, name, _ in dataclass_fields if hidden(name)} >= {"qkey", "remote_qkey", "secret"}
    tuples = {(kind, name) for kind in classes() for name in getattr(kind, "_fields", ()) if isinstance(name, str)}
    assert {(kind, name) for kind, name in tuples if hidden(name)} == set()
