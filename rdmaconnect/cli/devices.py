"""``rdmaconnect devices``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..errors import DeviceError, RdmaConnectError
from ..objects.context import device_names, open_device
from . import devinfo

if TYPE_CHECKING:
    from .arguments import Commands

__all__ = ["add"]


def add(commands: Commands, common: argparse.ArgumentParser) -> None:
    """Add the command to the program's."""
    devices = commands.add_parser(
        "devices", parents=[common], help="devices, ports, states and GID tables",
        description="What this host has; with -v all that ibv_devinfo -v tells.",
    )  # fmt: skip
    devices.set_defaults(run=_devices, parser=devices, logs=False)


def _devices(args: argparse.Namespace) -> int:
    names = device_names()
    if not names:
        raise DeviceError("list RDMA devices: there is none. Load a driver, or pass /dev/infiniband to the container.")
    if args.verbose:
        return _devinfo(names, args.json)
    found = [_describe_device(name) for name in names]
    if args.json:
        print(json.dumps({"devices": found}))
    else:
        for device in found:
            _print_device(device)
    return 0


def _devinfo(names: Sequence[str], as_json: bool) -> int:
    found = []
    for name in names:
        with open_device(name) as context:
            found.append(devinfo.describe(context))
    print(
        json.dumps({"devices": found}) if as_json else "\n".join(line for info in found for line in devinfo.lines(info))
    )
    return 0


def _describe_device(name: str) -> dict[str, Any]:
    try:
        with open_device(name) as context:
            return {"device": name, "ports": [port.asdict() for port in context.ports()]}
    except RdmaConnectError as e:
        return {"device": name, "error": str(e), "ports": []}


def _print_device(device: dict[str, Any]) -> None:
    print(device["device"] + (f": cannot be opened: {device['error']}" if "error" in device else ""))
    for port in device["ports"]:
        print(
            f"  port {port['port_num']}: {port['state']}, {port['link_layer']}, LID {port['lid']:#06x}, "
            f"MTU {port['active_mtu']} (at most {port['max_mtu']})"
        )
        for gid in port["gids"]:
            print(f"    gid {gid['gid_index']:3}: {gid['gid']:39} {gid['type']:7} {gid['netdev']}")
