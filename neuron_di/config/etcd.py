"""Where etcd is, how it knows us, and under which prefix our workers are.

A password is given by the name of its file only: whoever can list processes reads flags, and
options are written out for children.
"""

import re
from dataclasses import dataclass

from neuron_di.config.exposure import is_loopback
from neuron_di.config.option import option
from neuron_di.config.value import split_address
from neuron_di.errors import ConfigError

AUTO = "auto"
DEFAULT_PREFIX = "/neuron-di"

_PREFIX = re.compile(r"/|(/[A-Za-z0-9._-]{1,64}){1,8}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdOptions:
    """etcd, through which workers and proxies of several hosts find each other."""

    etcd: tuple[str, ...] = option(
        "addresses of etcd's members, any or all of them; auto, which a worker does not take, "
        "starts an etcd on this machine",
        default=(),
        default_text="the proxy's own registry, for one machine",
        form="HOST:PORT|auto",
    )
    etcd_prefix: str = option(
        "where our keys are: PREFIX/workers/ROLE/IP/PORT; a cluster sees no other's workers; / "
        "puts them at the top",
        default=DEFAULT_PREFIX,
        form="PREFIX",
    )
    etcd_ca: str | None = option(
        "certificate authority of etcd, PEM", default=None, default_text="no TLS", form="FILE"
    )
    etcd_cert: str | None = option(
        "our certificate for etcd, PEM, where it asks for one", default=None, form="FILE"
    )
    etcd_key: str | None = option(
        "private key of our certificate for etcd, PEM", default=None, form="FILE"
    )
    etcd_user: str | None = option(
        "our name at etcd, with a password",
        default=None,
        default_text="the certificate's, if any",
    )
    etcd_password_file: str | None = option(
        "file with the password of --etcd-user", default=None, form="FILE"
    )
    etcd_ttl_s: float = option(
        "seconds after which a worker that does not renew its lease disappears from etcd",
        default=10.0,
        at_least=2,
        at_most=600,
    )

    def __post_init__(self) -> None:
        if AUTO in self.etcd and len(self.etcd) > 1:
            raise ConfigError("--etcd is auto or a list of addresses, not both", param="etcd")
        if not _PREFIX.fullmatch(self.etcd_prefix):
            raise ConfigError(
                "--etcd-prefix must be / or like /name or /name/name, of letters, digits and ._-",
                param="etcd_prefix",
            )
        if (self.etcd_cert is None) != (self.etcd_key is None):
            raise ConfigError("--etcd-cert and --etcd-key go together", param="etcd_cert")
        if (self.etcd_user is None) != (self.etcd_password_file is None):
            raise ConfigError("--etcd-user and --etcd-password-file go together", param="etcd_user")
        if self.etcd_cert is not None and self.etcd_ca is None:
            raise ConfigError(
                "--etcd-cert needs --etcd-ca: without it nothing is encrypted", param="etcd_ca"
            )
        if not self.etcd and (self.etcd_ca or self.etcd_user):
            raise ConfigError(
                "--etcd-ca and --etcd-user are for etcd: give its addresses (--etcd), or neither",
                param="etcd",
            )
        if self.is_auto and (self.etcd_ca or self.etcd_user):
            raise ConfigError(
                "--etcd auto listens on loopback only, without TLS and users: give addresses, or "
                "neither --etcd-ca nor --etcd-user",
                param="etcd",
            )

    @property
    def shows_password(self) -> bool:
        """Whether a password crosses the network in the clear."""
        if self.etcd_password_file is None or self.etcd_ca is not None:
            return False
        return not all(is_loopback(split_address(each)[0]) for each in self.etcd)

    @property
    def is_auto(self) -> bool:
        """Whether we start an etcd of our own."""
        return self.etcd == (AUTO,)
