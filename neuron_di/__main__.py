"""`python -m neuron_di` is `neuron-di`."""

import sys

from neuron_di.cli import main

sys.exit(main())
