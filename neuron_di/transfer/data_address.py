"""Where a worker takes data connections, and where its peers are told to find it: in numbers.

--transfer-host, an address of this machine   there, and peers are told of it
--transfer-host 0.0.0.0 or ::                 at all addresses; peers are told what the worker
                                              announces
otherwise                                     as --host, and what the worker announces
"""

import ipaddress
import socket

from neuron_di.config import TransferOptions
from neuron_di.errors import ConfigError


def data_address(
    options: TransferOptions, host: str, announced_host: str | None = None
) -> tuple[str, str]:
    """(The address to listen on, the one to tell). ConfigError for a name that means nothing here,
    and where nobody who was told would get in.

    `host` is where the worker listens, `announced_host` what others reach it by.
    """
    listens = _address_of(options.transfer_host or host)
    if options.transfer_host is None:
        return listens, announced_host or listens
    if ipaddress.ip_address(listens).is_unspecified:
        told = announced_host or _address_of(host)
        if (":" in told) != (":" in listens):
            raise ConfigError(
                f"--transfer-host {listens} takes no connections to {told}, which this worker "
                "announces: give an address, or all of the same kind",
                param="transfer_host",
            )
        return listens, told
    if announced_host is not None and listens == _address_of(host):
        return listens, announced_host  # behind a translation of addresses that is another one
    return listens, listens


def _address_of(host: str) -> str:
    """What a socket that is bound to it listens on: of a name an IPv4 address, as for --host."""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        places = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise ConfigError(
            f"cannot listen for data connections on {host}: it is no address, and no name of one",
            param="transfer_host",
        ) from None
    return str(places[0][4][0])
