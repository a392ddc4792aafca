"""What stands between two ends' side channels, and does to them what networks do."""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import suppress

__all__ = ["Proxy"]


class Proxy:
    """Something between connector and listener that carries their side channels, until it is told otherwise."""

    def __init__(self, port: int, to: str = "127.0.0.1", here: str = "127.0.0.1") -> None:
        self._to, self._here = (to, port), here
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        #: those whose bytes go nowhere
        self.mute: set[socket.socket] = set()
        #: those that are being reset, and not closed
        self._resetting: set[socket.socket] = set()
        self.taken = 0
        self._ears = socket.create_server((here, 0))
        self.port = self._ears.getsockname()[1]
        threading.Thread(target=self._serve, args=(self._ears,), daemon=True).start()

    def _serve(self, ears: socket.socket) -> None:
        while True:
            try:
                here, _ = ears.accept()
            except OSError:
                return
            try:
                there = socket.create_connection(self._to)
            except OSError:
                here.close()
                continue
            self.taken += 1
            self._pairs.append((here, there))
            threading.Thread(target=self._both, args=(here, there), daemon=True).start()

    def _both(self, here: socket.socket, there: socket.socket) -> None:
        back = threading.Thread(target=self._carry, args=(there, here), daemon=True)
        back.start()
        self._carry(here, there)
        back.join()
        here.close()
        there.close()

    def _carry(self, a: socket.socket, b: socket.socket) -> None:
        try:
            while data := a.recv(65536):
                if a not in self.mute:
                    b.sendall(data)
            if a not in self._resetting:
                b.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def cut(self, of_connector: bool) -> None:
        """Nothing that one side says arrives any more; nor is either told."""
        self.mute |= {pair[0 if of_connector else 1] for pair in self._pairs}

    def refuse(self, seconds: float) -> None:
        """Refuse for so long."""
        self._stop()

        def again() -> None:
            self._ears = socket.create_server((self._here, self.port))
            self._serve(self._ears)

        thread = threading.Timer(seconds, again)
        thread.daemon = True
        thread.start()

    def reset(self) -> None:
        """Reset every connection, in both directions."""
        for sock in (socks := self._take()):
            with suppress(OSError):  # it has ended
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._resetting.update(socks)
        for sock in socks:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RD)  # a thread reads it, and so long closing would not reset it
            sock.close()

    def close(self) -> None:
        """Refuse from here on, and reset what there is."""
        self._stop()
        self.reset()

    def end(self) -> None:
        """Refuse from here on, and close what there is in order, as a kernel does when its process ends."""
        self._stop()
        for sock in self._take():
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _take(self) -> list[socket.socket]:
        """All that there are, which are no longer its own."""
        pairs, self._pairs = self._pairs, []
        return [sock for pair in pairs for sock in pair]

    def _stop(self) -> None:
        with suppress(OSError):  # a thread waits at it: closing alone would not wake that
            self._ears.shutdown(socket.SHUT_RDWR)
        self._ears.close()
