"""The options of `neuron-di doctor`, read so that a wrong variable is a finding and not the end."""

import argparse
from collections.abc import Mapping

from neuron_di.config import DoctorOptions, load_options, refused_variables

__all__ = ["DoctorOptions", "read_options"]


def read_options(flags: argparse.Namespace, environment: Mapping[str, str]) -> DoctorOptions:
    """As for any other command, but for variables that a server would refuse: these are left out.

    The check `environment` tells of them. ConfigError for wrong flags, and a wrong file.
    """
    refused = refused_variables(environment)
    kept = {name: value for name, value in environment.items() if name not in refused}
    return load_options(DoctorOptions, flags, kept, flags.config)
