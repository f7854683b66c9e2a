# shellcheck shell=bash
# Before step 2: neuron-di in an environment of its own, ROOT/.venv, laid over that of AWS's image.
# AWS's packages are used as they are, their torch above all; nothing is written to theirs, and the
# steps find it without an activation.

install() {
    local torch headers
    if [ -z "$IS_DRY" ]; then
        if [ -x "$ROOT/.venv/bin/neuron-di" ]; then
            say "installed already, in $ROOT/.venv"
            return
        fi
        [ -x "$SDK_ENVIRONMENT/bin/python" ] ||
            missing "there is no $SDK_ENVIRONMENT" "SDK_ENVIRONMENT=…: ls -d /opt/aws_neuronx*"
        need cc "sudo apt-get install gcc"
        headers=$("$SDK_ENVIRONMENT/bin/python" -c \
            'import sysconfig; print(sysconfig.get_path("include"))')
        [ -e "$headers/Python.h" ] || missing "there is no $headers/Python.h" \
            "sudo apt-get install python3-dev"
    fi
    capture torch '<TORCH>' "$SDK_ENVIRONMENT/bin/python" \
        -c 'import torch; print(torch.__version__)'
    run "$SDK_ENVIRONMENT/bin/python" -m venv "$ROOT/.venv" ||
        missing "that did not work" "sudo apt-get install python3-venv"
    lay_over_sdk
    run "$ROOT/.venv/bin/pip" install --quiet "${ROOT}[etcd]" "torch==${torch%%+*}"
}

# Packages that the environment does not have are looked for in the SDK's.
lay_over_sdk() {
    local packages=lib/python3.12/site-packages
    [ -n "$IS_DRY" ] || packages=lib/$(cd "$SDK_ENVIRONMENT/lib" && echo python3*)/site-packages
    say "\$ echo $SDK_ENVIRONMENT/$packages >$ROOT/.venv/$packages/neuron_sdk.pth"
    [ -n "$IS_DRY" ] ||
        echo "$SDK_ENVIRONMENT/$packages" >"$ROOT/.venv/$packages/neuron_sdk.pth"
}
