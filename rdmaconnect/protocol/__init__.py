"""What two ends say to each other: messages, handshake, and their bytes. Pure. This is the protocol's specification.

Transport
    ZeroMQ (ZMTP 3, NULL or CURVE) over one TCP connection for each peer; both ends are a DEALER, and a ROUTER
    is spoken with too. Each message is one frame, at most ``MAX_FRAME`` bytes; above 64 KiB only a hello that
    asks for many queue pairs, and what lists ports. A connection whose first bytes are no ZMTP 3 greeting with the
    mechanism expected is closed; so is one without a hello for 10 s. Default TCP port 18515.

Encoding
    One MessagePack map with text keys. Integers are MessagePack integers of any width, identifiers
    are ``bin``, text is UTF-8. Unknown keys and unknown types of messages are ignored; a missing key or a
    value out of range makes the message invalid. GIDs are 16 raw bytes in network order.

Every message has
    ======  =====  ==============================================================
    key     type   meaning
    ======  =====  ==============================================================
    v       int    major version of the protocol, 1. Another one is refused.
    t       text   ``hello``, ``reply``, ``ready``, ``joined``, ``proof``, ``beat``, ``reject``, ``bye``,
                   ``question`` or ``answer``
    id      bin    16 random bytes, one per attempt to connect, chosen by the connector
    ======  =====  ==============================================================

hello (connector to listener) and reply (listener to connector) have besides
    ======  =====  ==============================================================
    qpt     int    ``ibv_qp_type``
    qps     array  of [qp_num, psn, qkey], 1 to 4096; psn is the one its owner *sends from*;
                   a reply has as many as the hello, in the same order
    port    map    dev text, num, ll (``IBV_LINK_LAYER_*``), lid, mtu (``ibv_mtu``), grh bool,
                   pkeys array of int, ord (RDMA reads and atomics this end issues at once), ird
                   (those it answers at once), gids array of [gid bin 16, ``ibv_gid_type``, index,
                   netdev text]; index and netdev are for messages to people only; msz, which may be
                   missing (``max_msg_sz``)
    rsz     int    payload bytes that each posted receive takes
    mem     map    name -> [addr, length, rkey], at most 256 named memory regions
    data    bin    the application's own, at most 4096 bytes
    ======  =====  ==============================================================

hello
    wish    map    mtu (``ibv_mtu``), sl, tc, fl, pkey (int or nil), probe (bool: see below)
    prev    bin    ``token`` of the reply to the connection that this one takes the place of, or nil
    want    array  [device, port number, connector's GID, listener's GID] that the listener is to use,
                   the GIDs 16 bytes or nil; or nil for its own choice
    meet    bool   both sides call each other: see below
    patience  int  may be missing: milliseconds for which the connector goes on waiting, at most 2**31 - 1

reply
    agree   map    cg and lg (the connector's and the listener's GID entry, both nil where LIDs are
                   used), mtu, sl, tc, fl, pkey (15 bits)
    ports   array  of port maps: all that the listener could use, at most 16
    token   bin    may be missing: 16 random bytes, for ``prev`` of a later hello of the same connector. Only the
                   two ends know them: they are sent nowhere else, and with key files the connector's key has to
                   be the same besides

hello and reply may have besides
    beat    int    milliseconds, 100 to 60,000: the sender says ``beat`` so often, from its reply or its taking of
                   the reply on, whatever its application is at. A peer that announced it and is silent for three
                   of them, and 15 s at least, is gone. To a peer that announced none no beat and no joined is sent.

ready (connector to listener): the connector is in RTS.

joined (listener to connector): the listener is in RTS.

proof (either way, after ready): the sender has received the peer's probes, whole.

reply, ready and proof may have besides
    doors   array  of [name, microseconds], at most 64: the stages of the handshake that the sender has gone
                   through so far, names of at most 16 characters, times on its own clock since it began (the
                   connector's call, the arrival of the hello). For people; missing means none. The stages
                   ``hello``, ``reply`` and ``ready`` are where that message is sent, or has come.

beat (either way, after the reply): nothing more. It is not answered.

reject (either way, at any time)
    stage   text   the stage at which it failed, at most 64 characters
    errno   int    0 to 4095; 0 if none
    why     text   in words, at most 2048 characters
    ports   array  of port maps, as in reply; empty from a connector
    again   int    may be missing: the listener is busy; the connector may ask again, with a new id, after so many
                   milliseconds, at most 60,000

bye (either way, after ready)
    why     text   in words, at most 2048 characters

question (connector to listener, instead of hello): what the other host is, and which ports it has. A doctor asks it.

answer (to a question)
    host    text   the host's name, at most 256 characters
    remarks array  of [verdict (``fail`` or ``warn``), name, words, fix], at most 32: what is not as it should be there;
                   texts of at most 16, 64, 512 and 512 characters
    ports   array  of port maps, as in reply

Conversation
    hello -> reply -> ready. On hello the listener goes to RTR with the connector's values, receives
    posted, and replies; the connector goes to RTR and RTS, and may send at once; on ready the listener
    goes to RTS. A message that is repeated is answered the same way again.

    A reject that lists ports lets the connector try again with ``want`` and a new id.

    With ``probe`` each side, once in RTS, sends two messages over each queue pair: 16 bytes, and two
    path MTUs and one byte (UD: one MTU; never above ``rsz``). Their contents are the id, the index of
    the queue pair (4 bytes, network order), both repeated and cut to length. It says ``proof`` when it
    has received the peer's. Over UC and UD, which may lose them, they are sent again until the peer's
    proof comes. Only after both proofs does the application send.

    With ``meet`` each side listens and says hello to the other. Of the two hellos the one with the
    smaller id counts: its receiver answers it and takes its own back; its sender does not answer the
    other.

    A question is answered, or rejected by a listener that is no doctor; neither takes part in a conversation, and a
    hello may follow on the same TCP connection. A listener that does not know the type says nothing.

    A reject whose id is all zero answers bytes that could not be read.
"""
