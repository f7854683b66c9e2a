# shellcheck shell=bash
# Before step 2: neuron-di in an environment of its own, ROOT/.venv, laid over that of AWS's image.
# AWS's packages are used as they are, their torch above all; nothing is written to theirs, and the
# steps find it without an activation. Run again it installs this repository again.

install() {
    local torch headers made line clear=() path=$SDK_ENVIRONMENT
    # Of the SDK's environment also what its own .pth files bring.
    path+=/$(packages "$SDK_ENVIRONMENT")
    line="import site; site.addsitedir(${path@Q})"
    if [ -z "$IS_DRY" ]; then
        alone
        made=$(cat "$ROOT"/.venv/lib/python3*/site-packages/neuron_sdk.pth 2>/dev/null) || made=''
        if [ -z "$made" ] && [ -x "$ROOT/.venv/bin/neuron-di" ]; then
            say "$ROOT/.venv is not of this step, and stays as it is"
            return
        fi
        [ -x "$SDK_ENVIRONMENT/bin/python" ] ||
            missing "there is no $SDK_ENVIRONMENT" "SDK_ENVIRONMENT=…: ls -d /opt/aws_neuronx*"
        [ -x "$SDK_ENVIRONMENT/bin/neuronx-cc" ] || missing \
            "$SDK_ENVIRONMENT has no neuronx-cc" "SDK_ENVIRONMENT=…: ls /opt/*/bin/neuronx-cc"
        need cc "sudo apt-get install gcc"
        headers=$("$SDK_ENVIRONMENT/bin/python" -c \
            'import sysconfig; print(sysconfig.get_path("include"))')
        [ -e "$headers/Python.h" ] || missing "there is no $headers/Python.h" \
            "sudo apt-get install python3-dev"
        [ -z "$made" ] || [ "$made" = "$line" ] || clear=(--clear) # it was laid over another one
    fi
    capture torch '<TORCH>' "$SDK_ENVIRONMENT/bin/python" \
        -c 'import torch; print(torch.__version__)'
    run "$SDK_ENVIRONMENT/bin/python" -m venv "${clear[@]}" "$ROOT/.venv" ||
        missing "that did not work" "sudo apt-get install python3-venv"
    lay_over_sdk "$line"
    run "$ROOT/.venv/bin/pip" install --quiet "${ROOT}[etcd]" "torch==${torch%%+*}"
    say "For neuron-di by hand, in each shell: export PATH=$(word "$ROOT/.venv/bin"):\$PATH"
}

# packages ENVIRONMENT: where its packages lie, below it
packages() {
    local version=python3.12
    [ -n "$IS_DRY" ] || version=$(cd "$1/lib" 2>/dev/null && echo python3*) || true
    echo "lib/$version/site-packages"
}

# Packages that the environment does not have are looked for in the SDK's. torch-neuronx starts the
# compiler by its bare name, so that is beside neuron-di.
lay_over_sdk() {
    local file
    file=$ROOT/.venv/$(packages "$ROOT/.venv")/neuron_sdk.pth
    show_to ">$(word "$file")" echo "$1"
    [ -n "$IS_DRY" ] || echo "$1" >"$file"
    if [ -n "$IS_DRY" ]; then
        show ln -sf "$SDK_ENVIRONMENT/bin/neuronx-cc" "$ROOT/.venv/bin/"
    else
        run ln -sf "$SDK_ENVIRONMENT"/bin/neuronx-cc* "$ROOT/.venv/bin/"
    fi
}
