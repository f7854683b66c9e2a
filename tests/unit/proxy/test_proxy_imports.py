import subprocess
import sys


def test_the_proxy_loads_no_torch():
    code = (
        "import sys, neuron_di_proxy.app, neuron_di_proxy.server; sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
