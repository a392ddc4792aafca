"""The structs of `verbs.h` for packet steering and its counters. See `cstruct`.

A rule is one block of memory: an `ibv_flow_attr`, and `num_of_specs` specs behind it, each as long as its `size`
says. A filter has a value and a mask of the same form: where a bit of the mask is set, the packet must have the
value's. All that a packet carries is in network byte order.
"""

from __future__ import annotations

from .cstruct import CStruct


class ibv_flow_eth_filter(CStruct):
    """An Ethernet header; `vlan_tag` as 802.1q has it: priority 3 bits, CFI 1, VLAN id 12."""

    _c_ = """
        uint8_t dst_mac[6];
        uint8_t src_mac[6];
        uint16_t ether_type;
        uint16_t vlan_tag;
    """


class ibv_flow_spec_eth(CStruct):
    """Of type `ETH`."""

    _c_ = """
        enum ibv_flow_spec_type type;
        uint16_t size;
        struct ibv_flow_eth_filter val;
        struct ibv_flow_eth_filter mask;
    """


class ibv_flow_ipv4_filter(CStruct):
    """The addresses of an IPv4 header."""

    _c_ = """
        uint32_t src_ip;
        uint32_t dst_ip;
    """


class ibv_flow_spec_ipv4(CStruct):
    """Of type `IPV4`."""

    _c_ = """
        enum ibv_flow_spec_type type;
        uint16_t size;
        struct ibv_flow_ipv4_filter val;
        struct ibv_flow_ipv4_filter mask;
    """


class ibv_flow_ipv4_ext_filter(CStruct):
    """More of an IPv4 header; `flags` are its three flag bits."""

    _c_ = """
        uint32_t src_ip;
        uint32_t dst_ip;
        uint8_t proto;
        uint8_t tos;
        uint8_t ttl;
        uint8_t flags;
    """


class ibv_flow_spec_ipv4_ext(CStruct):
    """Of type `IPV4_EXT`."""

    _c_ = """
        enum ibv_flow_spec_type type;
        uint16_t size;
        struct ibv_flow_ipv4_ext_filter val;
        struct ibv_flow_ipv4_ext_filter mask;
    """


class ibv_flow_ipv6_filter(CStruct):
    """An IPv6 header; `flow_label` has 20 bits."""

    _c_ = """
        uint8_t src_ip[16];
        uint8_t dst_ip[16];
        uint32_t flow_label;
        uint8_t next_hdr;
        uint8_t traffic_class;
        uint8_t hop_limit;
    """


class ibv_flow_spec_ipv6(CStruct):
    """Of type `IPV6`."""

    _c_ = """
        enum ibv_flow_spec_type type;
        uint16_t size;
        struct ibv_flow_ipv6_filter val;
        struct ibv_flow_ipv6_filter mask;
    """


class ibv_flow_esp_filter(CStruct):
    """An IPsec ESP header: the association's index and the sequence number."""

    _c_ = """
        uint32_t spi;
        uint32_t seq;
    """


class ibv_flow_spec_esp(CStruct):
    """Of type `ESP`."""

    _c_ = """
        enum ibv_flow_spec_type type;
        uint16_t size;
        struct ibv_flow_esp_filter val;
        struct ibv_flow_esp_filter mask;
    """


class ibv_flow_tcp_udp_filter(CStruct):
    """The ports of a TCP or UDP header."""

    _c_ = """
        uint16_t dst_port;
        uint16_t src_port;
    """


class ibv_flow_spec_tcp_udp(CStruct):
    """Of type `TCP` or `UDP`."""

    _c_ = """
        enum ibv_flow_spec_type type;
        uint16_t size;
        struct ibv_flow_tcp_udp_filter val;
        struct ibv_flow_tcp_udp_filter mask;
    """


class ibv_flow_gre_filter(CStruct):
    """A GRE header: its first 16 bits (which say what is present), the protocol inside, the key."""

    _c_ = """
        uint16_t c_ks_res0_ver;
        uint16_t protocol;
        uint32_t key;
    """


class ibv_flow_spec_gre(CStruct):
    """Of type `GRE`."""

    _c_ = """
        enum ibv_flow_spec_type type;
        uint16_t size;
        struct ibv_flow_gre_filter val;
        struct ibv_flow_gre_filter mask;
    """


class ibv_flow_mpls_filter(CStruct):
    """An MPLS label entry, all 32 bits: label 20, traffic class 3, bottom of stack 1, TTL 8."""

    _c_ = "uint32_t label;"


class ibv_flow_spec_mpls(CStruct):
    """Of type `MPLS`."""

    _c_ = """
        enum ibv_flow_spec_type type;
        uint16_t size;
        struct ibv_flow_mpls_filter val;
        struct ibv_flow_mpls_filter mask;
    """


class ibv_flow_tunnel_filter(CStruct):
    """A tunnel's number, for VXLAN its VNI."""

    _c_ = "uint32_t tunnel_id;"


class ibv_flow_spec_tunnel(CStruct):
    """Of type `VXLAN_TUNNEL`."""

    _c_ = """
        enum ibv_flow_spec_type type;
        uint16_t size;
        struct ibv_flow_tunnel_filter val;
        struct ibv_flow_tunnel_filter mask;
    """


class ibv_flow_spec_action_tag(CStruct):
    """Of type `ACTION_TAG`: the number that `ibv_wc_read_flow_tag` gives for the packet."""

    _c_ = """
        enum ibv_flow_spec_type type;
        uint16_t size;
        uint32_t tag_id;
    """


class ibv_flow_spec_action_drop(CStruct):
    """Of type `ACTION_DROP`: the packet is dropped."""

    _c_ = """
        enum ibv_flow_spec_type type;
        uint16_t size;
    """


class ibv_flow_spec_action_handle(CStruct):
    """Of type `ACTION_HANDLE`: a flow action of `ibv_create_flow_action_esp`."""

    _c_ = """
        enum ibv_flow_spec_type type;
        uint16_t size;
        const struct ibv_flow_action *action;
    """


class ibv_flow_spec_counter_action(CStruct):
    """Of type `ACTION_COUNT`: the counters that count the packet."""

    _c_ = """
        enum ibv_flow_spec_type type;
        uint16_t size;
        struct ibv_counters *counters;
    """


class ibv_flow_spec(CStruct):
    """Any spec: `hdr` says which."""

    _c_ = """
        union {
            struct {
                enum ibv_flow_spec_type type;
                uint16_t size;
            } hdr;
            struct ibv_flow_spec_eth eth;
            struct ibv_flow_spec_ipv4 ipv4;
            struct ibv_flow_spec_tcp_udp tcp_udp;
            struct ibv_flow_spec_ipv4_ext ipv4_ext;
            struct ibv_flow_spec_ipv6 ipv6;
            struct ibv_flow_spec_esp esp;
            struct ibv_flow_spec_tunnel tunnel;
            struct ibv_flow_spec_gre gre;
            struct ibv_flow_spec_mpls mpls;
            struct ibv_flow_spec_action_tag flow_tag;
            struct ibv_flow_spec_action_drop drop;
            struct ibv_flow_spec_action_handle handle;
            struct ibv_flow_spec_counter_action flow_count;
        };
    """


class ibv_flow_attr(CStruct):
    """The head of a steering rule, its specs behind it; `size` is the length of all of it in bytes.

    `comp_mask` must be 0, `type` is a `FlowAttrType`, `flags` are `FlowAttrFlags`; of rules that a packet fits, the
    one with the lowest `priority` takes it. `port` counts from 1.
    """

    _c_ = """
        uint32_t comp_mask;
        enum ibv_flow_attr_type type;
        uint16_t size;
        uint16_t priority;
        uint8_t num_of_specs;
        uint8_t port;
        uint32_t flags;
    """


class ibv_flow(CStruct):
    """A steering rule in the device."""

    _c_ = """
        uint32_t comp_mask;
        struct ibv_context *context;
        uint32_t handle;
    """


class ibv_counters_init_attr(CStruct):
    """Reserved for the future: `comp_mask` must be 0."""

    _c_ = "uint32_t comp_mask;"


class ibv_counters(CStruct):
    """A set of counters for steering rules."""

    _c_ = "struct ibv_context *context;"


class ibv_counter_attach_attr(CStruct):
    """Which counter (`CounterDescription`) goes to which place, from 0, of the set; `comp_mask` must be 0."""

    _c_ = """
        enum ibv_counter_description counter_desc;
        uint32_t index;
        uint32_t comp_mask;
    """
