"""Which hardware this is."""

import os


def get_platform_target() -> str:
    """The family, "trn1", of the simulated instance, as the machine's own records would say.

    NEURON_PLATFORM_TARGET_OVERRIDE says it where there is none: to compile on another machine.
    """
    override = os.environ.get("NEURON_PLATFORM_TARGET_OVERRIDE")
    return override or os.environ.get("NRT_SIM_INSTANCE", "trn1.32xlarge").partition(".")[0]
