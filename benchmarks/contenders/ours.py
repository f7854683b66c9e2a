"""neuron-di's engine as a script uses it: `LLM.generate`, every layer of it included."""

from benchmarks.contenders.command_loop import Generate, Settings, obey
from neuron_di import LLM, SamplingParams, __version__


def load(settings: Settings) -> tuple[str, Generate]:
    llm = LLM(
        settings.model,
        device=settings.device,
        dtype=settings.dtype,
        threads=settings.threads,
        context_tokens=settings.context_tokens,
        decode_batch=settings.batch_max,
        kv_memory=settings.kv_bytes,
        # As a rule off: rounds and profiles repeat their prompts, which are to be computed.
        prefix_cache="on" if settings.prefix_caching else "off",
    )

    def generate(prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        return [answer.token_ids for answer in llm.generate(prompts, sampling)]

    return f"neuron-di {__version__}", generate


if __name__ == "__main__":
    obey(load)
