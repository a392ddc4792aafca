"""The C side of librdmacm as data: `rdma/rdma_cma.h`. Loads nothing, and is loaded by who connects by rdma_cm alone.

Made as the rest of this package is, and proven against real headers in `tests/abi/test_rdma_cma.py`. The library
allocates and frees `rdma_event_channel`, `rdma_cm_id` and `rdma_cm_event`; `rdma_conn_param` and the addresses are the
caller's. An event, and the private data that it points to, is the library's until `rdma_ack_cm_event`.
"""

from __future__ import annotations

import ctypes as c
from typing import Any

from .cenum import CEnum
from .cstruct import CStruct, scope
from .ctext import OPAQUE, declarations, layout
from .prototypes import Fails, prototypes
from .structs import STRUCTS

__all__ = [
    "CM_ENUMS",
    "CM_PROTOTYPES",
    "CM_SCOPE",
    "CM_STRUCTS",
    "CmEventType",
    "PortSpace",
    "rdma_addr",
    "rdma_cm_event",
    "rdma_cm_id",
    "rdma_conn_param",
    "rdma_event_channel",
    "rdma_ib_addr",
    "rdma_route",
    "rdma_ud_param",
    "sockaddr_storage",
]


class CmEventType(CEnum):
    """What an event of a communication identifier says. Source: rdma_get_cm_event(3)."""

    ADDR_RESOLVED = 0
    ADDR_ERROR = 1
    ROUTE_RESOLVED = 2
    ROUTE_ERROR = 3
    CONNECT_REQUEST = 4
    CONNECT_RESPONSE = 5
    CONNECT_ERROR = 6
    UNREACHABLE = 7
    REJECTED = 8
    ESTABLISHED = 9
    DISCONNECTED = 10
    DEVICE_REMOVAL = 11
    MULTICAST_JOIN = 12
    MULTICAST_ERROR = 13
    ADDR_CHANGE = 14
    TIMEWAIT_EXIT = 15


class PortSpace(CEnum):
    """Whose ports a number is one of: TCP for RC, UDP for UD. Source: rdma_create_id(3)."""

    IPOIB = 0x0002
    TCP = 0x0106
    UDP = 0x0111
    IB = 0x013F


#: class -> its enum in C, and what its members' names begin with there
CM_ENUMS: dict[type[CEnum], tuple[str, str]] = {
    CmEventType: ("rdma_cm_event_type", "RDMA_CM_EVENT_"),
    PortSpace: ("rdma_port_space", "RDMA_PS_"),
}


class sockaddr_storage(c.Union):
    """A socket address of any family, 128 bytes: family in host order, then port in network order, then the address."""

    _fields_ = (("family", c.c_uint16), ("size", c.c_char * 128), ("align", c.c_ulong))


class rdma_ib_addr(CStruct):
    """The GIDs and the P_Key of a path, in network order."""

    _c_ = """
        union ibv_gid sgid;
        union ibv_gid dgid;
        __be16 pkey;
    """


class rdma_addr(CStruct):
    """Source and destination, as socket addresses and as GIDs."""

    _c_ = """
        union { struct sockaddr_storage src_storage; };
        union { struct sockaddr_storage dst_storage; };
        union { struct rdma_ib_addr ibaddr; } addr;
    """


class rdma_route(CStruct):
    """The addresses, and `num_paths` path records."""

    _c_ = """
        struct rdma_addr addr;
        struct ibv_sa_path_rec *path_rec;
        int num_paths;
    """


class rdma_event_channel(CStruct):
    """Where events come: `fd` is readable when one waits."""

    _c_ = "int fd;"


class rdma_cm_id(CStruct):
    """A communication identifier, as a socket is for TCP. `verbs` and `port_num` are there once an address is resolved.

    `verbs` is a device that librdmacm has opened for itself.
    """

    _c_ = """
        struct ibv_context *verbs;
        struct rdma_event_channel *channel;
        void *context;
        struct ibv_qp *qp;
        struct rdma_route route;
        enum rdma_port_space ps;
        uint8_t port_num;
        struct rdma_cm_event *event;
        struct ibv_comp_channel *send_cq_channel;
        struct ibv_cq *send_cq;
        struct ibv_comp_channel *recv_cq_channel;
        struct ibv_cq *recv_cq;
        struct ibv_srq *srq;
        struct ibv_pd *pd;
        enum ibv_qp_type qp_type;
    """


class rdma_conn_param(CStruct):
    """What two ends tell each other of a connection. In an event the depths are seen from this side.

    `private_data_len` is bytes; `retry_count` and `rnr_retry_count` are 0 to 7; `qp_num` and `srq` count where the
    queue pair was not made by librdmacm.
    """

    _c_ = """
        const void *private_data;
        uint8_t private_data_len;
        uint8_t responder_resources;
        uint8_t initiator_depth;
        uint8_t flow_control;
        uint8_t retry_count;
        uint8_t rnr_retry_count;
        uint8_t srq;
        uint32_t qp_num;
    """


class rdma_ud_param(CStruct):
    """The same for UD."""

    _c_ = """
        const void *private_data;
        uint8_t private_data_len;
        struct ibv_ah_attr ah_attr;
        uint32_t qp_num;
        uint32_t qkey;
    """


class rdma_cm_event(CStruct):
    """An event. `status` is 0, a negative errno, or, of REJECTED, the other side's reason (IBTA 12.6.7.2)."""

    _c_ = """
        struct rdma_cm_id *id;
        struct rdma_cm_id *listen_id;
        enum rdma_cm_event_type event;
        int status;
        union {
            struct rdma_conn_param conn;
            struct rdma_ud_param ud;
        } param;
    """


_EXPORTED = {
    Fails.NULL_ERRNO: "struct rdma_event_channel *rdma_create_event_channel(void);",
    Fails.MINUS_ONE: """
        int rdma_create_id(struct rdma_event_channel *channel, struct rdma_cm_id **id, void *context,
                           enum rdma_port_space ps);
        int rdma_destroy_id(struct rdma_cm_id *id);
        int rdma_bind_addr(struct rdma_cm_id *id, struct sockaddr *addr);
        int rdma_resolve_addr(struct rdma_cm_id *id, struct sockaddr *src_addr, struct sockaddr *dst_addr,
                              int timeout_ms);
        int rdma_resolve_route(struct rdma_cm_id *id, int timeout_ms);
        int rdma_connect(struct rdma_cm_id *id, struct rdma_conn_param *conn_param);
        int rdma_establish(struct rdma_cm_id *id);
        int rdma_listen(struct rdma_cm_id *id, int backlog);
        int rdma_accept(struct rdma_cm_id *id, struct rdma_conn_param *conn_param);
        int rdma_reject(struct rdma_cm_id *id, const void *private_data, uint8_t private_data_len);
        int rdma_disconnect(struct rdma_cm_id *id);
        int rdma_get_cm_event(struct rdma_event_channel *channel, struct rdma_cm_event **event);
        int rdma_ack_cm_event(struct rdma_cm_event *event);
        int rdma_set_option(struct rdma_cm_id *id, int level, int optname, void *optval, size_t optlen);
        int rdma_init_qp_attr(struct rdma_cm_id *id, struct ibv_qp_attr *qp_attr, int *qp_attr_mask);
    """,
    Fails.NEVER: """
        void rdma_destroy_event_channel(struct rdma_event_channel *channel);
        __be16 rdma_get_src_port(struct rdma_cm_id *id);
    """,
}

#: every struct by its C name
CM_STRUCTS: dict[str, Any] = {
    cls.__name__: cls
    for cls in (
        rdma_ib_addr, rdma_addr, rdma_route, rdma_event_channel, rdma_cm_id, rdma_conn_param, rdma_ud_param,
        rdma_cm_event,
    )
}  # fmt: skip
#: what C type names mean here, for `ctext.declarations`
CM_SCOPE: dict[str, Any] = {
    **scope({**STRUCTS, **CM_STRUCTS}),
    "struct sockaddr_storage": sockaddr_storage,
    "struct sockaddr": OPAQUE,
    "struct ibv_sa_path_rec": OPAQUE,
}
for _name, _cls in CM_STRUCTS.items():
    _cls._anonymous_, _cls._fields_ = layout(declarations(_cls._c_, CM_SCOPE, _name))


#: every exported function that is used, by name
CM_PROTOTYPES = prototypes(_EXPORTED, CM_SCOPE, "RDMACM_1.0", {"RDMACM_1.2": "rdma_establish rdma_init_qp_attr"})
