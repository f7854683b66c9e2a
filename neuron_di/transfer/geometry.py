"""What peers say of their KV's geometry: as words of the wire and back, and whether it will do."""

from neuron_di.errors import ConfigError, PeerRefused, RemoteProtocolError
from neuron_di.kv import KvLayout
from neuron_di.transfer.kv_plan import resharding
from neuron_di.wire import LayoutFields


def layout_fields(layout: KvLayout) -> LayoutFields:
    return LayoutFields(
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        block_size=layout.block_size,
        dtype=layout.dtype,  # type: ignore[arg-type]  # a key of DTYPE_BYTES is one of these
        num_ranks=layout.num_ranks,
    )


def peer_layout(fields: LayoutFields, own: KvLayout, *, converts: bool) -> KvLayout:
    """The layout that a peer states, if KV can be brought from one into the other.

    RemoteProtocolError where it is no layout, PeerRefused where it cannot; both say why.
    """
    heads, ranks = fields.num_kv_heads, fields.num_ranks
    if heads % ranks and ranks % heads:
        raise RemoteProtocolError(f"{heads} KV heads cannot be spread over {ranks} ranks")
    layout = KvLayout(
        num_layers=fields.num_layers,
        num_kv_heads=heads,
        head_dim=fields.head_dim,
        block_size=fields.block_size,
        dtype=fields.dtype,
        num_ranks=ranks,
    )
    if layout.exchange_digest(converts=converts) != own.exchange_digest(converts=converts):
        raise PeerRefused(f"another KV layout: {_difference(layout, own, converts=converts)}")
    if layout.digest() == own.digest():
        return own
    try:
        resharding(layout, own)
    except ConfigError as error:
        raise PeerRefused(f"another KV layout: {error.message}") from None
    return layout


def _difference(layout: KvLayout, own: KvLayout, *, converts: bool) -> str:
    names = ["num_layers", "num_kv_heads", "head_dim", *(() if converts else ("dtype",))]
    pairs = [(name, getattr(layout, name), getattr(own, name)) for name in names]
    return ", ".join(f"{name} {its}, not {ours}" for name, its, ours in pairs if its != ours)
