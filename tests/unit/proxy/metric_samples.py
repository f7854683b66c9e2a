"""What GET /metrics says, as numbers."""

from prometheus_client.parser import text_string_to_metric_families


async def samples(proxy):
    """Every sample's value by name and labels."""
    async with proxy.http.get("/metrics") as response:
        assert response.status == 200
        assert response.content_type == "text/plain"
        return parse(await response.text())


def parse(text):
    return {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
