"""What two ends say to each other: messages, handshake, and their bytes. Pure. ``docs/wire.md`` specifies it."""
