"""Which wing may know which: read from the imports, so that the design stays true."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import rdmaconnect

ROOT = Path(rdmaconnect.__file__).parent
FILES = {".".join(p.relative_to(ROOT).with_suffix("").parts): p for p in sorted(ROOT.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text()) for name, path in FILES.items()}

#: wing, or file beside them -> the others that it may import
MAY_IMPORT: dict[str, set[str]] = {
    "hints": set(),
    "errors": {"hints"},
    "abi": set(),
    "shared_library": {"abi"},
    "verbs": {"abi", "errors", "shared_library"},
    "rdmacm": {"abi", "errors", "shared_library"},
    # pure: what two ends agree on, and what they say
    "agreement": {"abi", "errors"},
    "protocol": {"abi", "errors", "agreement"},
    # threads, waking, deadlines, procedures
    "runtime": {"errors"},
    # the two that touch the world
    "objects": {"abi", "errors", "verbs", "rdmacm", "agreement", "runtime"},
    "exchange": {"errors", "runtime"},
    "session": {"abi", "errors", "verbs", "agreement", "protocol", "runtime", "objects", "exchange"},
    "__init__": {"errors", "abi", "agreement", "protocol", "objects", "exchange", "session"},
    # the exchange: other programs' own, which is no part of a session
    "pingpong": {"abi", "errors", "agreement", "runtime", "objects", "exchange", "session"},
    "doctor": {"abi", "errors", "verbs", "agreement", "protocol", "runtime", "objects", "exchange", "session"},
    "cli": {
        "hints", "abi", "errors", "verbs", "agreement", "objects", "exchange", "session", "__init__", "pingpong",
        "doctor",
    },
    "__main__": {"cli"},
}  # fmt: skip
#: floors that the wings may stand on, one on the other; and lines of a file, but for the reference of all verbs
FLOORS_MAX, LINES_MAX = 8, 400
#: files that are longer still
LONG = {"verbs"}
PURE = {"agreement", "protocol"}
#: procedures stand on these, and the objects do not
PROCEDURES = {"runtime.wakeup", "runtime.workers", "runtime.procedure"}
#: file of the exchange -> the others of it that it may import: the pure ones below, the sockets above, the channel on
#: top
MAY_IMPORT_OF_EXCHANGE: dict[str, set[str]] = {
    "zmtp": set(),
    "budget": set(),
    "url": set(),
    "curve": set(),
    "tcp": {"url"},
    "dial": {"url", "tcp"},
    "stream": {"dial", "tcp", "url"},
    "service": set(),
    "relay": set(),
    "plain": {"relay", "zmtp"},
    "carried": {"curve", "link", "plain", "relay"},
    "link": {"alive", "curve", "plain", "zmtp"},
    "zap": {"link", "service"},
    "verdicts": {"zmtp"},
    "long_frames": {"service"},
    "alive": {"service"},
    "channel": {
        "alive",
        "budget",
        "carried",
        "curve",
        "zmtp",
        "long_frames",
        "plain",
        "relay",
        "service",
        "tcp",
        "verdicts",
    },
    "acceptor": {"channel", "curve", "service", "tcp", "url", "zap"},
    "__init__": set(),
}
#: what a pure room is handed in, and so does not import
IMPURE = {
    "time", "datetime", "random", "secrets", "uuid", "os", "sys", "logging", "socket", "select", "threading",
    "asyncio", "subprocess", "ctypes", "zmq", "pathlib",
}  # fmt: skip
PICKLES = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}


def imports(name: str) -> Iterator[tuple[str, str]]:
    """(module, name) of everything that a file imports; ours with a leading dot."""
    package = ["rdmaconnect", *name.split(".")[:-1]]
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, ""
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                yield module, alias.name


def ours(name: str) -> set[str]:
    """The files of this package that a file imports."""
    found = set()
    for module, what in imports(name):
        if module == "rdmaconnect" or module.startswith("rdmaconnect."):
            inner = module.removeprefix("rdmaconnect").removeprefix(".")
            for candidate in (
                f"{inner}.{what}".strip("."),
                f"{inner}.{what}.__init__".strip("."),
                inner,
                f"{inner}.__init__",
            ):
                if candidate in FILES:
                    found.add(candidate)
                    break
            else:
                found.add("__init__")
    return found


def foreign(name: str) -> set[str]:
    """The top-level packages of others that a file imports."""
    return {module.partition(".")[0] for module, _ in imports(name)} - {"rdmaconnect"}


def room(name: str) -> str:
    """The wing that a file is in, or the file beside them."""
    return name.partition(".")[0]


def known(name: str) -> set[str]:
    """The other rooms that the files of one import."""
    return {room(other) for file in FILES if room(file) == name for other in ours(file)} - {name}


def identifiers(tree: ast.AST) -> Iterator[str]:
    """Every name that a program uses, texts and comments left out."""
    for node in ast.walk(tree):
        for field in ("id", "attr", "name", "asname", "arg"):
            value = getattr(node, field, None)
            if isinstance(value, str):
                yield value


def test_the_reader_of_imports_sees_them() -> None:
    assert ours("verbs") == {"abi.__init__", "errors", "shared_library"}
    assert ours("objects.memory") >= {"verbs", "abi.__init__", "objects.owned"}
    assert ours("__main__") == {"cli.__init__"}
    assert ours("__init__") >= {"session.connect", "errors"}
    assert ours("abi.structs") >= {"abi.structs_device", "abi.cstruct"}
    assert foreign("exchange.link") >= {"zmq", "os", "threading"}
    assert ours("exchange.link") >= {"errors", "runtime.fork", "exchange.curve"}
    assert "ibv_modify_qp" in set(identifiers(TREES["verbs"]))


@pytest.mark.parametrize("name", MAY_IMPORT)
def test_a_room_knows_only_those_below_it(name: str) -> None:
    assert known(name) <= MAY_IMPORT[name]


def test_the_rooms_are_these() -> None:
    assert set(MAY_IMPORT) == {room(name) for name in FILES}


def test_the_rooms_stand_on_few_floors() -> None:
    floors: dict[str, int] = {}
    for name in TopologicalSorter({name: known(name) for name in MAY_IMPORT}).static_order():  # a circle raises
        floors[name] = 1 + max((floors[other] for other in known(name)), default=0)
    print(f"{len(floors)} rooms on {max(floors.values())} floors: {floors}")
    assert max(floors.values()) <= FLOORS_MAX


def test_there_is_no_circle() -> None:
    order = list(TopologicalSorter({name: ours(name) - {name} for name in FILES}).static_order())
    assert order.index("errors") < order.index("verbs") < order.index("objects.context") < order.index("cli.__init__")


def test_no_file_is_too_long_to_be_read() -> None:
    long = {name for name, path in FILES.items() if len(path.read_text().splitlines()) > LINES_MAX}
    assert long == LONG


def test_the_objects_wait_and_do_not_run_procedures() -> None:
    assert {name for name in FILES if room(name) == "objects" and ours(name) & PROCEDURES} == set()


def test_nothing_imports_the_command_line() -> None:
    assert {name for name in FILES if room(name) != "cli" and "cli" in map(room, ours(name))} == {"__main__"}
    assert not any("__main__" in ours(name) for name in FILES)


def test_a_file_of_the_exchange_knows_only_those_below_it() -> None:
    parts = {name.removeprefix("exchange."): name for name in FILES if room(name) == "exchange"}
    assert set(parts) == set(MAY_IMPORT_OF_EXCHANGE)
    for part, name in parts.items():
        known = {other.removeprefix("exchange.") for other in ours(name) if room(other) == "exchange"}
        assert known <= MAY_IMPORT_OF_EXCHANGE[part], part
    TopologicalSorter(MAY_IMPORT_OF_EXCHANGE).prepare()


def test_only_the_link_its_keys_and_who_is_asked_for_them_know_zeromq() -> None:
    assert {name for name in FILES if "zmq" in foreign(name)} == {"exchange.link", "exchange.zap", "exchange.curve"}


def test_only_what_waits_knows_asyncio() -> None:
    # waiting: the awaitable events of the objects, for users without a connection; the exchange: its one thread's loop
    exchange = {f"exchange.{name}" for name in ("service", "relay", "carried", "channel", "alive")}
    assert {name for name in FILES if "asyncio" in foreign(name)} == {
        "runtime.procedure",
        "runtime.unattended",
        "objects.waitable",
    } | exchange


def test_only_a_few_files_know_the_clock() -> None:
    # channel and acceptor: how long ago something was heard; curve: how long ago a folder was read; probe: how long
    # ago it sent; watch: how long ago something changed; outgoing and redial hand it to dial; alive and conversation:
    # how long this process was there, since when a health is what it is; bound: when an end was made; in_band: how long
    # ago it sent; pingpong measures
    found = {name for name in FILES if {"time", "datetime"} & foreign(name)}
    assert found == {
        "runtime.deadline", "session.outgoing", "session.probe", "pingpong.rounds", "pingpong.rdma_core",
        "exchange.channel", "exchange.long_frames", "exchange.acceptor", "exchange.curve", "session.watch",
            "session.conversation", "session.redial", "exchange.alive", "session.bound", "session.in_band",
    }  # fmt: skip


def test_only_the_exchange_makes_connections() -> None:
    # others ask the kernel about a route or a netdev, and swap bytes
    makers = {"SOCK_STREAM", "create_server", "create_connection", "socketpair", "connect_ex"}
    found = {name for name, tree in TREES.items() if makers & set(identifiers(tree))}
    assert {room(name) for name in found} == {"exchange"}


def test_only_one_file_knows_whether_there_is_a_fork() -> None:
    assert {name for name, tree in TREES.items() if "register_at_fork" in set(identifiers(tree))} == {"runtime.fork"}


def test_what_is_said_first_and_whom_to_dial_are_handed_the_clock() -> None:
    assert not (foreign("exchange.zmtp") | foreign("exchange.budget")) & IMPURE
    for name in ("exchange.dial", "exchange.url", "exchange.tcp"):
        assert not foreign(name) & (IMPURE - {"os", "socket"}), name


def test_only_one_file_loads_libraries() -> None:
    loaders = {"CDLL", "PyDLL", "WinDLL", "LibraryLoader", "LoadLibrary", "cdll", "find_library", "dlopen"}
    found = {name for name, tree in TREES.items() if loaders & set(identifiers(tree))}
    assert found == {"shared_library", "verbs"}  # the latter looks for the C library of this process
    using = {name for name, tree in TREES.items() if "SharedLibrary" in set(identifiers(tree))}
    assert using == {"shared_library", "verbs", "rdmacm"}


@pytest.mark.parametrize("name", sorted(name for name in FILES if room(name) in PURE))
def test_a_pure_room_is_handed_clock_chance_and_world(name: str) -> None:
    assert not foreign(name) & IMPURE
    assert not {"open", "print", "input", "environ", "getenv"} & set(identifiers(TREES[name]))


def is_private(name: str) -> bool:
    """Whether a name of ours is not for others: ``_fields_`` and its like are those of ctypes."""
    return name.startswith("_") and not name.endswith("_")


def private_names(tree: ast.AST) -> set[str]:
    """The private attributes that a file defines: methods, and what is set on self or in the body of a class."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node.value, set()):
            found.add(node.attr)
        elif isinstance(node, ast.ClassDef):
            targets = [part.target for part in node.body if isinstance(part, ast.AnnAssign)]
            targets += [target for part in node.body if isinstance(part, ast.Assign) for target in part.targets]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return {name for name in found if is_private(name)}


def is_own(value: ast.expr, classes: set[str]) -> bool:
    """Whether an expression is the object itself, its class, or what it inherits."""
    if isinstance(value, ast.Call):
        return isinstance(value.func, ast.Name) and value.func.id == "super"
    return isinstance(value, ast.Name) and value.id in {"self", "cls"} | classes


def reached_into(tree: ast.AST) -> list[tuple[int, str]]:
    """(line, expression) of each private attribute of another object."""
    classes = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    return [
        (node.lineno, ast.unparse(node))
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and is_private(node.attr) and not is_own(node.value, classes)
    ]


def test_the_reader_of_private_names_sees_them() -> None:
    tree = ast.parse(
        "class A:\n _x = 1\n def _f(self): self._y = b._z; return A._f, super()._w, b.c._fields_, self._a._b"
    )
    assert private_names(tree) == {"_x", "_f", "_y"}
    assert {words for _, words in reached_into(tree)} == {"b._z", "self._a._b"}


def test_nobody_reaches_into_an_object_of_another_file() -> None:
    defined = {name: private_names(tree) for name, tree in TREES.items()}
    ours_ = set().union(*defined.values())
    assert len(ours_) > 100
    found = {
        f"{name}:{line}: {words}"
        for name, tree in TREES.items()
        for line, words in reached_into(tree)
        if (attr := words.rpartition(".")[2]) in ours_ and attr not in defined[name]
    }
    assert found == set()


def test_the_session_deals_with_ends_by_their_public_names() -> None:
    # what a user holds gives its end to those who connect through it
    found = {words for name, tree in TREES.items() if room(name) == "session" for _, words in reached_into(tree)}
    assert found == {"connection._end"}


def test_c_names_stay_where_c_is_spoken() -> None:
    elsewhere = [name for name in FILES if room(name) not in {"abi", "verbs", "rdmacm", "objects"}]
    found = {name: [word for word in identifiers(TREES[name]) if word.startswith("ibv_")] for name in elsewhere}
    assert {name: words for name, words in found.items() if words} == {}


def test_nothing_is_pickled_or_evaluated() -> None:
    assert {name: foreign(name) & PICKLES for name in FILES if foreign(name) & PICKLES} == {}
    calls = [(name, node.func) for name, tree in TREES.items() for node in ast.walk(tree) if isinstance(node, ast.Call)]
    named = {(name, func.id) for name, func in calls if isinstance(func, ast.Name)}
    assert {(name, word) for name, word in named if word in {"eval", "exec", "__import__"}} == set()


def test_what_a_file_offers_is_there_once() -> None:
    for name in FILES.keys() - {"__main__"}:
        module = importlib.import_module(f"rdmaconnect.{name}".removesuffix(".__init__"))
        offered = getattr(module, "__all__", [])
        assert [word for word in offered if not hasattr(module, word)] == [], name
        assert len(set(offered)) == len(offered), name


def test_the_package_offers_about_thirty_names_and_no_code() -> None:
    assert {"connect", "listen", "Connection", "Listener", "Options", "RdmaConnectError"} <= set(rdmaconnect.__all__)
    assert len(rdmaconnect.__all__) < 70
    allowed = (ast.Expr, ast.Import, ast.ImportFrom, ast.Assign)
    plain = [node for node in TREES["__init__"].body if not isinstance(node, ast.If)]
    assert all(isinstance(node, allowed) for node in plain)
    # what type checkers read, and what Python does instead: tests/house/test_imports.py
    conditions = [ast.unparse(node.test) for node in TREES["__init__"].body if isinstance(node, ast.If)]
    assert conditions == ["TYPE_CHECKING", "not TYPE_CHECKING"]


def test_no_room_is_called_after_nothing() -> None:
    assert not {name.rpartition(".")[2] for name in FILES} & {"utils", "util", "common", "helpers", "misc", "core"}


def overloads(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> bool:
    """Whether it only types another one, which has the docstring."""
    return any(isinstance(mark, ast.Name) and mark.id == "overload" for mark in node.decorator_list)


def test_files_and_public_things_say_what_they_are() -> None:
    public = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    missing = [name for name, tree in TREES.items() if not ast.get_docstring(tree)]
    for name, tree in TREES.items():
        things = [node for node in tree.body if isinstance(node, public) and not node.name.startswith("_")]
        missing += [f"{name}.{node.name}" for node in things if not ast.get_docstring(node) and not overloads(node)]
    assert missing == []


#: functions of verbs.py that no room calls -> why they are there
FOR_OTHERS = {
    **dict.fromkeys(
        ("ibv_poll_cq", "ibv_post_send", "ibv_post_recv", "ibv_post_srq_recv", "ibv_post_wq_recv"),
        "the hot path finds their op once and keeps it; both read the result by errno_of",
    ),
    **dict.fromkeys(
        ("ibv_node_type_str", "ibv_port_state_str", "ibv_wc_status_str", "ibv_rate_to_mult", "mult_to_ibv_rate",
         "ibv_rate_to_mbps", "mbps_to_ibv_rate"),
        "words and numbers of the library's, where the package has enums",
    ),
    **dict.fromkeys(("ibv_fork_init", "ibv_is_fork_initialized"), "a program's choice, before it opens a device"),
    "ibv_reg_mr_ex": "what it adds, DMA handles and buffers, is made by other means",
    "ibv_open_qp": "another process's queue pair of XRC, which no class here is of",
    "ibv_wr_set_inline_data_list": "a batch copies inline data into one piece: rxe sends none of a list",
}  # fmt: skip


def test_every_function_of_librdmacm_is_called_by_a_room() -> None:
    found = [node for tree in TREES.values() for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    called = {node.attr for node in found if isinstance(node.value, ast.Name) and node.value.id == "rdmacm"}
    tree = TREES["rdmacm"]
    there = {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")}
    assert there <= called


def test_every_verb_is_called_by_a_room_or_it_is_said_why_not() -> None:
    found = [node for tree in TREES.values() for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    called = {node.attr for node in found if isinstance(node.value, ast.Name) and node.value.id == "verbs"}
    verbs = TREES["verbs"]
    calls = [node.func for node in ast.walk(verbs) if isinstance(node, ast.Call)]
    called |= {func.id for func in calls if isinstance(func, ast.Name)}
    there = {node.name for node in verbs.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")}
    assert there - called == set(FOR_OTHERS)
