"""What users meet: the keywords of the calls, what is documented of them, listeners that iterate; see test_typing."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from exchange_ends import PATIENCE_S, channels, free_port, until
from software import Software, connected

import rdmaconnect
from rdmaconnect import errors
from rdmaconnect.abi import QpType
from rdmaconnect.agreement.options import OptionsDict
from rdmaconnect.exchange.curve import SECRET_VARIABLE
from rdmaconnect.session.terms import (
    BaseOptions,
    BindOptions,
    ConnectOptions,
    EndOptions,
    ListenOptions,
    QpTypeName,
    make_terms,
)

CONNECTING: list[Callable[..., Any]] = [
    rdmaconnect.connect, rdmaconnect.connect_many, rdmaconnect.meet,
    rdmaconnect.aconnect, rdmaconnect.aconnect_many, rdmaconnect.ameet,
]  # fmt: skip
LISTENING: list[Callable[..., Any]] = [rdmaconnect.listen, rdmaconnect.alisten]


@pytest.fixture(autouse=True)
def _no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)


def documented(thing: Any, section: str = "Args") -> list[str]:
    """The names that a docstring tells of in a section."""
    text = inspect.getdoc(thing) or ""
    body = re.search(rf"^{section}:\n((?:    .*\n|\n)+)", text + "\n", re.MULTILINE)
    assert body, thing
    heads = re.findall(r"^    ([\w*][\w, *]*):", body[1], re.MULTILINE)
    return [name for head in heads for name in head.replace("*", "").split(", ")]


# ---- one definition


def test_the_keywords_are_the_fields_of_options() -> None:
    fields = get_type_hints(rdmaconnect.Options)
    assert list(get_type_hints(OptionsDict).items()) == list(fields.items())
    assert [field.name for field in dataclasses.fields(rdmaconnect.Options)] == list(fields)


@pytest.mark.parametrize(("kind", "base"), [
    (EndOptions, OptionsDict), (BaseOptions, EndOptions), (BindOptions, EndOptions), (ConnectOptions, BaseOptions),
    (ListenOptions, BaseOptions),
])  # fmt: skip
def test_each_keyword_is_documented_where_it_is_defined(kind: type, base: type) -> None:
    assert documented(kind) == [name for name in kind.__annotations__ if name not in base.__annotations__]


def test_each_option_is_documented() -> None:
    assert documented(rdmaconnect.Options) == [
        name for field in dataclasses.fields(rdmaconnect.Options) for name in [field.name]
    ]


@pytest.mark.parametrize("call", [*CONNECTING, *LISTENING])
def test_each_call_takes_them_all(call: Callable[..., Any]) -> None:
    *plain, rest = inspect.signature(call).parameters.values()
    assert rest.kind is rest.VAR_KEYWORD
    kind = ListenOptions if call in LISTENING else ConnectOptions
    assert get_type_hints(call)[rest.name].__args__ == (kind,)
    names = [parameter.name for parameter in plain]
    assert not set(names) & set(kind.__annotations__)
    if call.__name__ in ("connect", "connect_many", "meet", "listen"):
        assert documented(call) == [*names, rest.name]
        return
    twin = getattr(rdmaconnect, call.__name__.removeprefix("a"))
    assert list(inspect.signature(twin).parameters) == [*names, rest.name]
    assert f":func:`{twin.__name__}`" in str(call.__doc__)


def test_the_names_of_types_are_those_that_can_be_connected() -> None:
    assert [QpType[name] for name in QpTypeName.__args__] == [QpType.RC, QpType.UC, QpType.UD]  # type: ignore[attr-defined]


def test_what_is_documented_as_the_default_is() -> None:
    terms = make_terms({})
    assert (terms.qp_type, terms.options, terms.private_data, terms.keys) == (
        QpType.RC, rdmaconnect.Options(), b"", None
    )  # fmt: skip


def test_a_keyword_takes_the_place_of_the_object_s_field() -> None:
    given = rdmaconnect.Options(sl=3, device="mlx5_0", path_mtu=1024)
    made = make_terms({"options": given, "sl": 5, "path_mtu": None}).options
    assert made == rdmaconnect.Options(sl=5, device="mlx5_0")
    assert given.sl == 3
    assert make_terms({"options": given}).options == given
    assert make_terms({"options": None, "sl": 5}).options == rdmaconnect.Options(sl=5)


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"options": {"sl": 3}}, TypeError, "^options is of type dict: give an Options$"),
        ({"options": rdmaconnect.Options(), "sl": 16}, ValueError, "^sl is 16: give 0 to 15 .4 bits.$"),
        ({"qp_type": "TCP"}, ValueError, "^qp_type is 'TCP': give 'RC', 'UC' or 'UD'$"),
    ],
)
def test_what_is_given_is_checked(given: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make_terms(given)


@pytest.mark.parametrize("call", CONNECTING)
def test_a_name_that_there_is_not_is_refused_with_the_one_that_is_meant(call: Callable[..., Any]) -> None:
    places = {"local": "127.0.0.1:0", "peer": "127.0.0.1", "count": 2}
    given = {name: value for name, value in places.items() if name in inspect.signature(call).parameters}
    words = r"^deadline \(deadline_s\?\), mtu \(path_mtu\?\), peer_keys \(peer_key\?\): there is no such option\. "
    with pytest.raises(TypeError, match=words):
        done(call(**given, mtu=1024, deadline=3, peer_keys="known"))


@pytest.mark.parametrize("call", LISTENING)
def test_so_is_one_that_a_listener_has_not(software: Software, call: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match=r"^peer_key \(peer_keys\?\), qp_type \(qp_types\?\): there is no such option"):
        done(call("127.0.0.1:0", peer_key="a.key", qp_type="RC"))


def done(result: Any) -> Any:
    """What a call of either kind comes to."""
    return asyncio.run(result) if inspect.iscoroutine(result) else result


# ---- what is offered


def test_every_error_is_exported() -> None:
    kinds = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception)}
    assert len(kinds) > 15
    assert kinds <= set(rdmaconnect.__all__)


def test_what_a_docstring_of_the_front_names_is_exported() -> None:
    for front in (
        rdmaconnect.Connection, rdmaconnect.AsyncConnection, rdmaconnect.Listener, rdmaconnect.AsyncListener,
        *CONNECTING, *LISTENING, BaseOptions, BindOptions, ConnectOptions, EndOptions, ListenOptions,
    ):  # fmt: skip
        texts = [inspect.getdoc(front), *(inspect.getdoc(part) for part in vars(front).values() if callable(part))]
        named = set(re.findall(r":(?:class|func):`([\w.]+)`", "\n".join(filter(None, texts))))
        assert named <= set(rdmaconnect.__all__) | {"MR"}, front


@pytest.mark.parametrize("front", [rdmaconnect.Connection, rdmaconnect.Listener])
def test_a_front_documents_its_own_attributes(software: Software, front: type) -> None:
    with rdmaconnect.listen("127.0.0.1:0", probe=False) as listener:
        here = rdmaconnect.connect(listener.url, probe=False)
        with here, listener.accept():
            thing = here if front is rdmaconnect.Connection else listener
            parts = {name: inspect.getattr_static(thing, name) for name in dir(thing) if not name.startswith("_")}
    attributes = {name: part for name, part in parts.items() if not inspect.isroutine(part)}
    properties = {name for name, part in attributes.items() if inspect.getdoc(part) and isinstance(part, property)}
    assert len(properties) > 1
    assert set(attributes) - properties == ATTRIBUTES[front]
    assert all(name in str(inspect.getdoc(front)) for name in ATTRIBUTES[front] - INTERNAL)


#: what other files of the session read of a listener
INTERNAL = {"terms", "workers"}
#: what is no property
ATTRIBUTES: dict[type, set[str]] = {rdmaconnect.Connection: set(), rdmaconnect.Listener: {"url"} | INTERNAL}


# ---- what the calls give


@pytest.mark.parametrize("count", [1, 3])
def test_many_are_a_list_and_one_is_one(software: Software, count: int) -> None:
    with rdmaconnect.listen("127.0.0.1:0", probe=False) as listener:
        made = rdmaconnect.connect_many(listener.url, count, probe=False)
        amade = asyncio.run(close_all(listener.url, count))
        assert isinstance(made, list)
        assert [type(one) for one in made] == [rdmaconnect.Connection] * count
        assert amade == [rdmaconnect.AsyncConnection] * count
        for one in [*made, *(listener.accept(deadline_s=PATIENCE_S) for _ in range(2 * count))]:
            one.close()


async def close_all(url: str, count: int) -> list[type]:
    made = await rdmaconnect.aconnect_many(url, count, probe=False)
    for one in made:
        await one.close()
    return [type(one) for one in made]


def test_read_gives_bytes_and_read_into_fills(software: Software) -> None:
    with connected(listen={"regions": {"m": bytearray(range(16))}}) as (here, _):
        assert here.read("m") == bytes(range(16))
        assert here.read("m", 3, offset=4) == b"\4\5\6"
        assert here.read("m", offset=14) == b"\x0e\x0f"
        assert here.read("m", 0) == b""
        into = bytearray(8)
        assert here.read_into(into, "m", offset=8) == 8
        assert into == bytes(range(8, 16))
        assert here.read_into(into, here.remote["m"], 2) == 2
        assert into == b"\0\1" + bytes(range(10, 16))
        with here.register(bytearray(4)) as mr:
            assert here.read_into(mr, "m") == 4
        for wrong, words in (
            (lambda: here.read_into(into, "m", 9), "read 9 bytes: the buffer has 8"),
            (lambda: here.read_into(bytes(8), "m"), "read into a read-only bytes: give a writable one"),
            (lambda: here.read_into(into, "m", offset=9), "8 bytes at offset 9: the remote region has 16"),
            (lambda: here.read("m", 1 << 50), "the remote region has 16"),
            (lambda: here.read("m", offset=17), "the remote region has 16"),
        ):
            with pytest.raises(ValueError, match=words):
                wrong()
        with pytest.raises(LookupError, match="no region 'n'; it has m"):
            here.read_into(into, "n")


# ---- listeners that iterate


def test_a_listener_gives_its_connections_until_it_is_closed(software: Software) -> None:
    listener = rdmaconnect.listen("127.0.0.1:0", probe=False)
    made = rdmaconnect.connect_many(listener.url, 3, probe=False)
    came: list[int] = []

    def serve() -> None:
        for conn in listener:
            came.append(conn.peer.qp_num)
            conn.close()

    thread = threading.Thread(target=serve)
    thread.start()
    until(lambda: len(came) == 3)
    thread.join(0.1)
    assert thread.is_alive()
    listener.close()  # ends the loop, which waits for the next
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert came == [one.local.qp_num for one in made]
    assert list(listener) == []
    for one in made:
        one.close()


def test_so_does_asyncio_s(software: Software) -> None:
    async def serve() -> int:
        count = 0
        async with await rdmaconnect.alisten("127.0.0.1:0", probe=False) as listener:
            made = await rdmaconnect.aconnect_many(listener.url, 3, probe=False)
            async for conn in listener:
                await conn.close()
                count += 1
                if count == 3:  # while it waits for the next
                    closing = asyncio.get_running_loop().call_later(0.1, lambda: tasks.append(close(listener)))
        assert closing.when() > 0
        await asyncio.gather(*tasks, *(one.close() for one in made))
        return count

    def close(listener: rdmaconnect.AsyncListener) -> asyncio.Task[None]:
        return asyncio.create_task(listener.close())

    tasks: list[asyncio.Task[None]] = []
    assert asyncio.run(asyncio.wait_for(serve(), PATIENCE_S)) == 3


# ---- peer_key is the key of the one peer


@pytest.fixture
def files(tmp_path: Path) -> dict[str, tuple[str, str]]:
    return {name: rdmaconnect.keygen(str(tmp_path), name) for name in ("a", "b", "stranger")}


@pytest.mark.parametrize("known", ["b", "stranger"])
def test_who_meets_has_one_peer_too(software: Software, files: dict[str, tuple[str, str]], known: str) -> None:
    ports = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    given = [{"key": files["a"][1], "peer_key": files[known][0]}, {"key": files["b"][1], "peer_key": files["a"][0]}]
    seconds = PATIENCE_S if known == "b" else 1.0
    with ThreadPoolExecutor(2) as threads:
        sides = [
            threads.submit(rdmaconnect.meet, ports[n], ports[1 - n], deadline_s=seconds, probe=False, **given[n])
            for n in range(2)
        ]
        if known == "b":
            a, b = (side.result() for side in sides)
            with a, b:
                a.send(b"only us")
                assert b.recv(deadline_s=PATIENCE_S) == b"only us"
        else:
            for side in sides:
                with pytest.raises((rdmaconnect.AuthenticationError, rdmaconnect.ConnectTimeout)):
                    side.result()
    until(lambda: channels() == 0)
