#!/bin/sh
# Builds one guest image: the kernel with a workload inside.
#   build-guest.sh my.c [more.c more.S ...] -o my.elf
# The compiler is $LACUNA_GUEST_CC, or cc. build.rs does the same steps with the same flag files.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
cc=${LACUNA_GUEST_CC:-cc}
out=guest.elf
sources=
while [ $# -gt 0 ]; do
    case $1 in
        -o) out=$2; shift ;;
        *) sources="$sources $1" ;;
    esac
    shift
done
[ -n "$sources" ] || { sed -n '2,4s/^# *//p' "$0" >&2; exit 2; }
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
link="-nostdlib -static -no-pie -Wl,--build-id=none -Wl,-z,max-page-size=4096 -Wl,-z,noexecstack"
# shellcheck disable=SC2086 # lists of words, on purpose
$cc "@$here/user/arch/x86/cflags" -I"$here/include" -I"$here/workloads" -I"$here/user/arch/x86" $link -T "$here/user/arch/x86/user.ld" -o "$tmp/program.elf" \
    "$here"/user/arch/x86/*.S "$here"/user/*.c $sources
# shellcheck disable=SC2086
$cc "@$here/kernel/arch/x86/cflags" -I"$here/include" -I"$here/kernel" -I"$here/kernel/arch/x86" \
    -I"$here/user/arch/x86" -I"$tmp" -Wa,-I"$tmp" $link \
    -T "$here/kernel/arch/x86/kernel.ld" -o "$out" "$here"/kernel/*.S "$here"/kernel/*.c "$here"/kernel/arch/x86/*.S "$here"/kernel/arch/x86/*.c \
    "$here/user/format.c" "$here/user/memory.c"
