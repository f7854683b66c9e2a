from neuron_di.errors import WorkerFailed


async def test_a_pool_is_told_of_blocks_before_they_are_filled(cluster, monkeypatch):
    prefill, decode = cluster.prefill(), cluster.decode()
    told = []

    def begin_fill(block_ids, *, num_kept=0):
        assert decode.pool.generations([7, 2]) == before
        assert bytes(decode.pool.view(7)) == old
        told.append(list(block_ids))

    before, old = decode.pool.generations([7, 2]), bytes(decode.pool.view(7))
    monkeypatch.setattr(decode.pool, "begin_fill", begin_fill)
    prefill.park()
    token = await decode.hand_over(prefill, [7, 2])
    assert token.error() is None
    assert bytes(decode.pool.view(7)) != old
    assert told == [[7, 2]]


async def test_a_fill_ends_before_anybody_may_compute_with_it(cluster, monkeypatch):
    prefill, decode = cluster.prefill(), cluster.decode()
    told = []

    def end_fill(block_ids, num_tokens):
        assert bytes(decode.pool.view(7)) != old
        told.append((list(block_ids), num_tokens))
        raise WorkerFailed("the device takes nothing")

    old = bytes(decode.pool.view(7))
    monkeypatch.setattr(decode.pool, "end_fill", end_fill)
    ready = prefill.park()
    token = await decode.hand_over(prefill, [7, 2])
    assert isinstance(token.error(), WorkerFailed)
    assert told == [([7, 2], ready.num_tokens)]
