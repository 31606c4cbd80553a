#!/bin/sh
# Builds one guest image: the kernel with a workload inside.
#   build-guest.sh [--arch x86_64|arm64] my.c [more.c more.S ...] -o my.elf
# The compiler for x86_64 is $LACUNA_GUEST_CC, or cc; for arm64 it is $LACUNA_GUEST_CC_ARM64, or
# aarch64-linux-gnu-gcc. build.rs does the same steps for x86_64 with the same flag files.
set -eu
export LC_ALL=C # the order of files
absolute() {
    case $1 in
        /*) echo "$1" ;;
        *) echo "$PWD/$1" ;;
    esac
}

arch=x86
out=$(absolute guest.elf)
sources=
while [ $# -gt 0 ]; do
    case $1 in
        -o) out=$(absolute "$2"); shift ;;
        --arch)
            case $2 in
                x86_64) arch=x86 ;;
                arm64) arch=arm64 ;;
                *) echo "build-guest.sh: no architecture $2: give x86_64 or arm64" >&2; exit 2 ;;
            esac
            shift ;;
        *) sources="$sources $(absolute "$1")" ;;
    esac
    shift
done
[ -n "$sources" ] || { sed -n '2,5s/^# *//p' "$0" >&2; exit 2; }
cd "$(dirname "$0")"
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
link="-nostdlib -static -no-pie -Wl,--build-id=none -Wl,-z,max-page-size=4096 -Wl,-z,noexecstack"
kernel_link=$link
gc=
cc=${LACUNA_GUEST_CC:-cc}
shared=
if [ $arch = arm64 ]; then
    cc=${LACUNA_GUEST_CC_ARM64:-aarch64-linux-gnu-gcc}
    gc=-Wl,--gc-sections
    kernel_link="$gc -nostdlib -static-pie -Wl,--no-dynamic-linker -Wl,--build-id=none
        -Wl,-z,max-page-size=4096 -Wl,-z,noexecstack -Wl,-z,norelro -Wl,--no-warn-rwx-segments"
    shared=user/arch/arm64/atomics.S
fi
# What every image has is compiled once if LACUNA_GUEST_OBJECTS names a folder to keep it in.
objects=${LACUNA_GUEST_OBJECTS:-$tmp}
includes="-Iinclude -Ikernel -Iworkloads -I$tmp"
for part in kernel user workloads; do
    includes="$includes -I$part/arch/$arch"
done

compile() { # FLAGS FOLDER SOURCE: prints the object
    object="$2/$1-$(echo "$3" | tr '/.' '--').o"
    # shellcheck disable=SC2086 # lists of words, on purpose
    [ -f "$object" ] || $cc "@$1/arch/$arch/cflags" $includes -Wa,-I"$tmp" -c "$3" -o "$object"
    echo "$object"
}

compile_all() { # FLAGS FOLDER SOURCE...
    flags=$1 folder=$2
    shift 2
    for source; do
        [ ! -f "$source" ] || compile "$flags" "$folder" "$source"
    done
}

program=
for source in $sources; do
    program="$program $(compile user "$tmp" "$source")"
done
library=$(compile_all user "$objects" user/arch/$arch/*.S user/*.c user/arch/$arch/*.c)
# shellcheck disable=SC2086
$cc "@user/arch/$arch/cflags" $link $gc -s -T "user/arch/$arch/user.ld" \
    -o "$tmp/program.elf" $library $program
# shellcheck disable=SC2086
kernel=$(compile_all kernel "$objects" kernel/*.c kernel/arch/$arch/*.S \
    kernel/arch/$arch/*.c user/format.c user/memory.c $shared)
blob=$(compile kernel "$tmp" kernel/program.S)
# shellcheck disable=SC2086
$cc "@kernel/arch/$arch/cflags" $kernel_link -T "kernel/arch/$arch/kernel.ld" \
    -o "$tmp/kernel.elf" $blob $kernel
if [ $arch = arm64 ]; then
    "$($cc -print-prog-name=objcopy)" -O binary "$tmp/kernel.elf" "$out" # Linux's `Image`
else
    cp "$tmp/kernel.elf" "$out"
fi
