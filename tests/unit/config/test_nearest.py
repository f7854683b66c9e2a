from neuron_di.config.nearest import nearest


def test_the_most_similar_name_is_found_and_there_is_always_one():
    names = ["port", "host", "prefill_batch", "decode_batch"]
    assert nearest("prot", names) == "port"
    assert nearest("decode-batches", names) == "decode_batch"
    assert nearest("", names) in names
