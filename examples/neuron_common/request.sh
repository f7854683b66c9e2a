# shellcheck shell=bash
# Step 5. A completion, a streamed chat, and who did what.

request() {
    local answer receipt
    local messages='"messages": [{"role": "user", "content": "Tell me a story about a fox."}]'
    need_neuron_di
    only_first_host
    need_ready
    capture answer '"id":"<ID>"' curl --silent --show-error --fail-with-body \
        "$URL/v1/completions" "${AUTHORIZATION[@]}" -H 'Content-Type: application/json' \
        -d "{\"model\": \"$MODEL_NAME\", \"prompt\": \"Once upon a time\", \"max_tokens\": 32}"
    tell "$answer"
    run curl --silent --show-error --fail-with-body --no-buffer \
        "$URL/v1/chat/completions" "${AUTHORIZATION[@]}" -H 'Content-Type: application/json' \
        -d "{\"model\": \"$MODEL_NAME\", \"stream\": true, \"max_tokens\": 8, $messages}"
    capture receipt '' curl --silent --show-error --fail-with-body \
        "$URL/v1/receipts/$(field id "$answer")" "${AUTHORIZATION[@]}"
    tell "computed by $(field prefill_worker "$receipt"), then $(field decode_worker "$receipt")"
    tell "its KV went by the engine $(field link "$receipt") ($(field link_reason "$receipt"))"
    run neuron-di status --url "$URL"
}

# field NAME DOCUMENT: the first text of that name in a JSON document.
field() {
    if [[ $2 =~ \"$1\":\ ?\"([^\"]*)\" ]]; then echo "${BASH_REMATCH[1]}"; else echo none; fi
}
