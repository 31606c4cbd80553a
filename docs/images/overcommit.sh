#!/usr/bin/env bash
# Records docs/images/overcommit.svg, after `cargo build --release`, on an otherwise idle machine:
#
#     pip install termtosvg
#     termtosvg docs/images/overcommit.svg -c docs/images/overcommit.sh -g 100x30 -m 400 -M 2500
cd "$(dirname "$0")/../.."
lacuna=${LACUNA:-target/release/lacuna}

show() { # ARGUMENTS...: prints the command as a person types it, and runs it
    printf '$ lacuna'
    for word in "$@"; do
        sleep 0.15
        printf ' %s' "$word"
    done
    sleep 0.5
    printf '\n'
    "$lacuna" "$@"
    sleep 2
}

show run bm --memory 2G --resident 512M --vcpus 2 --apf off
clear
show run bm --memory 2G --resident 512M --vcpus 2 --apf on
sleep 2
