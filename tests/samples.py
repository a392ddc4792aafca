"""Ends of connections to test with: valid, and each field can be replaced; and strategies that make them."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from rdmaconnect.abi import GidType, LinkLayer, Mtu, PortFlags, PortState, QpType
from rdmaconnect.agreement.endpoint import Endpoint, Gid, GidEntry, GidKey, PortAddress, RemoteRegion
from rdmaconnect.agreement.path import Wish
from rdmaconnect.objects.context import Port
from rdmaconnect.protocol.messages import Target

ID = bytes(range(16))
IB, V1, V2 = GidType.IB, GidType.ROCE_V1, GidType.ROCE_V2


def gid(text: str, gid_type: GidType = V2, gid_index: int = 0, netdev: str = "eth0") -> GidEntry:
    return GidEntry(Gid.parse(text), gid_type, gid_index, netdev)


def roce(*gids: GidEntry, **fields: Any) -> PortAddress:
    given = {"device": "rxe0", "port_num": 1, "lid": 0, "active_mtu": Mtu.MTU_1024, "gids": gids} | fields
    return PortAddress(link_layer=LinkLayer.ETHERNET, **given)


def infiniband(lid: int = 5, *gids: GidEntry, **fields: Any) -> PortAddress:
    given = {"device": "mlx5_0", "port_num": 1, "active_mtu": Mtu.MTU_4096, "gids": gids} | fields
    return PortAddress(link_layer=LinkLayer.INFINIBAND, lid=lid, **given)


def end(port: PortAddress | None = None, **fields: Any) -> Endpoint:
    port = roce(gid("10.0.0.1")) if port is None else port
    return Endpoint(**{"qp_type": QpType.RC, "qp_num": 0x11, "psn": 0x111111, "port": port, "recv_size": 4096} | fields)


def port(*gids: GidEntry, name: str = "rxe0", **fields: Any) -> Port:
    """A port of this host, ACTIVE, on Ethernet; what no test asks for is 0."""
    given = {
        "device": name, "port_num": 1, "state": PortState.ACTIVE, "link_layer": LinkLayer.ETHERNET,
        "max_mtu": Mtu.MTU_4096, "active_mtu": Mtu.MTU_1024, "flags": PortFlags(0), "pkeys": (0xFFFF,), "gids": gids,
    }  # fmt: skip
    return Port(**dict.fromkeys(Port.__dataclass_fields__, 0) | given | fields)


# ---- the same, arbitrary

U8, U16, U32, U64 = (st.integers(0, 2**bits - 1) for bits in (8, 16, 32, 64))
PSNS = st.integers(0, 2**24 - 1)
TEXTS = st.text("abcXYZ019-_:. é漢🐟", max_size=20)
MTUS = st.sampled_from(list(Mtu))

gids = st.builds(
    GidEntry,
    st.one_of(
        st.binary(min_size=16, max_size=16).filter(any).map(Gid),
        st.sampled_from(["fe80::1", "2001:db8::7", "10.0.0.9", "169.254.0.3", "::1"]).map(Gid.parse),
    ),
    st.sampled_from(list(GidType)),
    U8,
    TEXTS,
    st.booleans(),
)
ports = st.builds(
    PortAddress,
    device=TEXTS,
    port_num=st.integers(1, 254),
    link_layer=st.sampled_from(list(LinkLayer)),
    lid=U16,
    active_mtu=MTUS,
    gids=st.lists(gids, max_size=4).map(tuple),
    grh_required=st.booleans(),
    pkeys=st.lists(U16, max_size=3).map(tuple),
    max_rd_atomic=U8,
    max_dest_rd_atomic=U8,
)
wishes = st.builds(
    Wish,
    MTUS,
    st.none() | st.integers(0, 15),
    st.none() | U8,
    st.none() | st.integers(0, 2**20 - 1),
    st.none() | st.integers(1, 0xFFFF),
    st.booleans(),
)
IDS = st.binary(min_size=16, max_size=16)
KINDS = st.sampled_from(list(GidType))
targets = (
    st.none()
    | st.builds(Target, TEXTS, st.integers(1, 254), *[st.none() | IDS.map(GidKey)] * 2)
    | st.builds(Target, TEXTS, st.integers(1, 254), *[st.builds(GidKey, IDS, KINDS, TEXTS)] * 2)
)
private = st.binary(max_size=50)
regions = st.dictionaries(TEXTS, st.builds(RemoteRegion, U64, U32, U64), max_size=3)


@st.composite
def ends(draw: st.DrawFn) -> tuple[Endpoint, ...]:
    """The ends of one message: they share all but number, PSN and key."""
    qp_type, port, size = draw(st.sampled_from(list(QpType))), draw(ports), draw(st.integers(0, 2**31))
    numbers = draw(st.lists(st.tuples(st.integers(1, 2**24 - 1), PSNS, U32), min_size=1, max_size=4))
    return tuple(Endpoint(qp_type, qp_num, psn, port, size, qkey) for qp_num, psn, qkey in numbers)
